# SPDX-License-Identifier: Apache-2.0
"""Lists the codes of failed calls with their names and texts.

The driver has texts too, but errors need them without a driver as well.
"""

from __future__ import annotations

__all__ = ["CODES"]

# cumem's own codes are negative (csrc/base/status.h). The others are the codes of CUDA
# 12.9's runtime that cumem can meet. CUDA never changes their numbers.
_TABLE = """\
-1 CM_EINVALID invalid argument
-2 CM_ESHAPE shapes do not match
-3 CM_EOVERFLOW a size or an offset does not fit in 63 bits
-4 CM_ECLOSED the object is closed
-5 CM_ENOMEM out of ordinary host memory
-6 CM_ELIMIT the limit would be passed
-7 CM_EFORKED CUDA cannot be used in a forked child process; start it with \
multiprocessing's spawn or forkserver
-8 CM_ENOTSUP the driver or device cannot do this
-9 CM_EBUSY the memory is in use
-10 CM_ETHREAD a thread could not be started
-11 CM_ESYSTEM a system call failed
-12 CM_ECANCELLED the transfer was cancelled
-13 CM_ETIMEOUT the time given has passed
-14 CM_EHOSTMEMORY the process may not use that much more memory (cgroup memory.max, \
ulimit -v, or what the machine has left)
-15 CM_ENUMA the memory did not come from the NUMA node asked for
-16 CM_EMANAGED the device has no concurrent managed access (Windows, WSL, GPUs before \
Pascal): there pages move only as a whole, when kernels start, and cannot be prefetched
-17 CM_ECAPTURING the stream is being captured, and a graph cannot hold what the host \
does or what has to be waited for
-18 CM_EFAULT memory of the copy cannot be accessed: the file that is mapped there was \
cut short, cannot be read or written, or has holes and no room is left on its disk
-19 CM_ECAST an element cannot be converted to the target's dtype
-20 CM_EROWS numbers name rows that are not there, which the device found out as it read \
them; such rows were left out
-21 CM_EASLEEP the region is asleep, or on its way to sleep or awake; call its wake() first
1 cudaErrorInvalidValue invalid argument
2 cudaErrorMemoryAllocation out of memory
3 cudaErrorInitializationError initialization error
4 cudaErrorCudartUnloading driver shutting down
9 cudaErrorInvalidConfiguration invalid configuration argument
12 cudaErrorInvalidPitchValue invalid pitch argument
16 cudaErrorInvalidHostPointer invalid host pointer
17 cudaErrorInvalidDevicePointer invalid device pointer
21 cudaErrorInvalidMemcpyDirection invalid copy direction for memcpy
34 cudaErrorStubLibrary CUDA driver is a stub library
35 cudaErrorInsufficientDriver CUDA driver version is insufficient for CUDA runtime \
version
36 cudaErrorCallRequiresNewerDriver API call is not supported in the installed CUDA \
driver
46 cudaErrorDevicesUnavailable CUDA-capable device(s) is/are busy or unavailable
49 cudaErrorIncompatibleDriverContext incompatible driver context
52 cudaErrorMissingConfiguration __global__ function call is not configured
98 cudaErrorInvalidDeviceFunction invalid device function
100 cudaErrorNoDevice no CUDA-capable device is detected
101 cudaErrorInvalidDevice invalid device ordinal
102 cudaErrorDeviceNotLicensed device doesn't have valid Grid license
127 cudaErrorStartupFailure startup failure in cuda runtime
200 cudaErrorInvalidKernelImage device kernel image is invalid
201 cudaErrorDeviceUninitialized invalid device context
205 cudaErrorMapBufferObjectFailed mapping of buffer object failed
206 cudaErrorUnmapBufferObjectFailed unmapping of buffer object failed
208 cudaErrorAlreadyMapped resource already mapped
209 cudaErrorNoKernelImageForDevice no kernel image is available for execution on the \
device
210 cudaErrorAlreadyAcquired resource already acquired
211 cudaErrorNotMapped resource not mapped
213 cudaErrorNotMappedAsPointer resource not mapped as pointer
214 cudaErrorECCUncorrectable uncorrectable ECC error encountered
216 cudaErrorDeviceAlreadyInUse exclusive-thread device already in use by a different \
thread
217 cudaErrorPeerAccessUnsupported peer access is not supported between these two \
devices
218 cudaErrorInvalidPtx a PTX JIT compilation failed
220 cudaErrorNvlinkUncorrectable uncorrectable NVLink error detected during the \
execution
221 cudaErrorJitCompilerNotFound PTX JIT compiler library not found
222 cudaErrorUnsupportedPtxVersion the provided PTX was compiled with an unsupported \
toolchain.
223 cudaErrorJitCompilationDisabled PTX JIT compilation was disabled
226 cudaErrorContained Invalid access of peer GPU memory over nvlink or a hardware error
300 cudaErrorInvalidSource device kernel image is invalid
301 cudaErrorFileNotFound file not found
302 cudaErrorSharedObjectSymbolNotFound shared object symbol not found
303 cudaErrorSharedObjectInitFailed shared object initialization failed
304 cudaErrorOperatingSystem OS call failed or operation not supported on this OS
400 cudaErrorInvalidResourceHandle invalid resource handle
401 cudaErrorIllegalState the operation cannot be performed in the present state
500 cudaErrorSymbolNotFound named symbol not found
600 cudaErrorNotReady device not ready
700 cudaErrorIllegalAddress an illegal memory access was encountered
701 cudaErrorLaunchOutOfResources too many resources requested for launch
702 cudaErrorLaunchTimeout the launch timed out and was terminated
704 cudaErrorPeerAccessAlreadyEnabled peer access is already enabled
705 cudaErrorPeerAccessNotEnabled peer access has not been enabled
708 cudaErrorSetOnActiveProcess cannot set while device is active in this process
709 cudaErrorContextIsDestroyed context is destroyed
710 cudaErrorAssert device-side assert triggered
711 cudaErrorTooManyPeers peer mapping resources exhausted
712 cudaErrorHostMemoryAlreadyRegistered part or all of the requested memory range is \
already mapped
713 cudaErrorHostMemoryNotRegistered pointer does not correspond to a registered \
memory region
714 cudaErrorHardwareStackError hardware stack error
715 cudaErrorIllegalInstruction an illegal instruction was encountered
716 cudaErrorMisalignedAddress misaligned address
717 cudaErrorInvalidAddressSpace operation not supported on global/shared address space
718 cudaErrorInvalidPc invalid program counter
719 cudaErrorLaunchFailure unspecified launch failure
800 cudaErrorNotPermitted operation not permitted
801 cudaErrorNotSupported operation not supported
802 cudaErrorSystemNotReady system not yet initialized
803 cudaErrorSystemDriverMismatch system has unsupported display driver / cuda driver \
combination
804 cudaErrorCompatNotSupportedOnDevice forward compatibility was attempted on non \
supported HW
805 cudaErrorMpsConnectionFailed MPS client failed to connect to the MPS control \
daemon or the MPS server
806 cudaErrorMpsRpcFailure the remote procedural call between the MPS server and the \
MPS client failed
807 cudaErrorMpsServerNotReady MPS server is not ready to accept new MPS client requests
808 cudaErrorMpsMaxClientsReached the hardware resources required to create MPS client \
have been exhausted
809 cudaErrorMpsMaxConnectionsReached the hardware resources required to support \
device connections have been exhausted
810 cudaErrorMpsClientTerminated the MPS client has been terminated by the server
900 cudaErrorStreamCaptureUnsupported operation not permitted when stream is capturing
901 cudaErrorStreamCaptureInvalidated operation failed due to a previous error during \
capture
902 cudaErrorStreamCaptureMerge operation would result in a merge of separate capture \
sequences
903 cudaErrorStreamCaptureUnmatched capture was not ended in the same stream as it began
904 cudaErrorStreamCaptureUnjoined capturing stream has unjoined work
905 cudaErrorStreamCaptureIsolation dependency created on uncaptured work in another \
stream
906 cudaErrorStreamCaptureImplicit operation would make the legacy stream depend on a \
capturing blocking stream
907 cudaErrorCapturedEvent operation not permitted on an event last recorded in a \
capturing stream
908 cudaErrorStreamCaptureWrongThread attempt to terminate a thread-local capture \
sequence from another thread
909 cudaErrorTimeout wait operation timed out
910 cudaErrorGraphExecUpdateFailure the graph update was not performed because it \
included changes which violated constraints specific to instantiated graph update
911 cudaErrorExternalDevice an async error has occured in external entity outside of \
CUDA
999 cudaErrorUnknown unknown error
"""

#: Names and texts by code.
CODES: dict[int, tuple[str, str]] = {
    int(code): (name, text)
    for code, name, text in (line.split(" ", 2) for line in _TABLE.splitlines())
}
