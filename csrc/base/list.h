/* SPDX-License-Identifier: Apache-2.0 */
/* A list is circular and doubly linked, and its nodes are members of the structs that
 * are in the list. Entering and leaving a list allocate nothing, so they cannot fail. A
 * node that is in no list points to itself. A list has no lock of its own. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef struct cm_list {
    struct cm_list *next;
    struct cm_list *prev;
} cm_list;

/* Returns the struct of type `type` of which `node` is the member `member`. */
#define CM_LIST_ENTRY(node, type, member)                                              \
    ((type *)(void *)((char *)(node) - offsetof(type, member)))

static inline void
cm_list_init(cm_list *list)
{
    list->next = list;
    list->prev = list;
}

static inline bool
cm_list_is_empty(const cm_list *list)
{
    return list->next == list;
}

static inline void
cm_list_push_back(cm_list *list, cm_list *node)
{
    node->prev = list->prev;
    node->next = list;
    list->prev->next = node;
    list->prev = node;
}

static inline void
cm_list_push_front(cm_list *list, cm_list *node)
{
    cm_list_push_back(list->next, node);
}

/* Take `node` out of the list that it is in. This does no harm if the node is in no
 * list. */
static inline void
cm_list_remove(cm_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    cm_list_init(node);
}

/* Take out the first node and return it, or NULL if the list is empty. */
static inline cm_list *
cm_list_pop_front(cm_list *list)
{
    if (cm_list_is_empty(list)) {
        return NULL;
    }
    cm_list *node = list->next;
    cm_list_remove(node);
    return node;
}

/* Append all of `from` to `list`; `from` is empty afterwards. */
static inline void
cm_list_splice_back(cm_list *list, cm_list *from)
{
    if (cm_list_is_empty(from)) {
        return;
    }
    from->next->prev = list->prev;
    list->prev->next = from->next;
    from->prev->next = list;
    list->prev = from->prev;
    cm_list_init(from);
}

static inline size_t
cm_list_count(const cm_list *list)
{
    size_t count = 0;
    for (const cm_list *node = list->next; node != list; node = node->next) {
        count++;
    }
    return count;
}
