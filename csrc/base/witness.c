/* SPDX-License-Identifier: Apache-2.0 */
/* Implements witnesses with a memfd and F_SEAL_WRITE. witness.h explains the idea. */
#include "base/witness.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/machine.h"

void
cm_witness_create(cm_witness *witness)
{
    size_t nbytes = cm_page_nbytes();
    witness->page = NULL;
    witness->fd = memfd_create("cumem-fork", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (witness->fd < 0) {
        return;
    }
    void *page = MAP_FAILED;
    if (ftruncate(witness->fd, (off_t)nbytes) == 0) {
        page = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, witness->fd, 0);
    }
    /* Sealing must fail while the page is mapped here. If it succeeds, the system does
     * not keep this rule, and sealing could not tell later whether a child is left. */
    if (page == MAP_FAILED || fcntl(witness->fd, F_ADD_SEALS, F_SEAL_WRITE) == 0) {
        cm_witness_close(witness);
        return;
    }
    witness->page = page;
}

void
cm_witness_leave(cm_witness *witness)
{
    if (witness->page != NULL) {
        (void)munmap(witness->page, cm_page_nbytes());
        witness->page = NULL;
    }
}

void
cm_witness_inherit(cm_witness *witness)
{
    witness->page = NULL;
    cm_witness_close(witness);
}

bool
cm_witness_is_over(const cm_witness *witness)
{
    return witness->fd >= 0 && fcntl(witness->fd, F_ADD_SEALS, F_SEAL_WRITE) == 0;
}

void
cm_witness_close(cm_witness *witness)
{
    if (witness->fd >= 0) {
        (void)close(witness->fd);
        witness->fd = -1;
    }
}
