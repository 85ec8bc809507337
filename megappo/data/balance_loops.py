"""How are thousands of costs dealt to groups in a millisecond or two? Three loops, compiled by numba when this file is imported.

legend: n items in descending order of their costs, k groups; `group[i]` is the group of item i. No fast-math: every rank that
runs these loops on the same costs finds the same groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NONE = -1


@njit("void(int64[::1], int64, int64, float64[::1])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sift_down(heap: Any, at: int, size: int, key: Any) -> None:
    """Put the entry at `at` in its place in a heap of indices whose first has the largest key, of equal ones the lowest index."""
    entry = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if key[right] > key[left] or (key[right] == key[left] and right < left):
                child += 1
        best = heap[child]
        if key[best] < key[entry] or (key[best] == key[entry] and best > entry):
            break
        heap[at] = best
        at = child
    heap[at] = entry


@njit("void(int64[::1], float64[::1])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _make_heap(heap: Any, key: Any) -> None:
    """Fill `heap` with the indices of all keys."""
    for i in range(len(heap)):
        heap[i] = i
    for at in range(len(heap) // 2 - 1, -1, -1):
        _sift_down(heap, at, len(heap), key)


@njit("int64[::1](float64[::1], int64, int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def difference(costs: Any, k: int, per_state: int) -> Any:
    """Groups by largest differencing (Karmarkar and Karp, 1982; https://en.wikipedia.org/wiki/Largest_differencing_method).

    per_state: k where each group takes one item of every k consecutive ones (n is a multiple of k), so that groups are equal in
    number; 1 where only costs count. A state is k partial groups in descending order of their sums; the two states that are
    spread most are joined, the largest groups of one with the smallest of the other, until one state is left."""
    n = len(costs)
    size = n // per_state
    sums, spread, joined = np.empty((size, k)), np.empty(size), np.empty(k)
    first = np.empty((size, k), np.int64)  # a partial group is a chain of items: its first, its last, what follows each
    last = np.empty((size, k), np.int64)
    follows = np.empty(n, np.int64)
    joined_first, joined_last, order = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.int64)
    group, heap = np.empty(n, np.int64), np.empty(size, np.int64)
    for state in range(size):
        for j in range(k):
            item = state * per_state + j if j < per_state else NONE
            first[state, j] = last[state, j] = item
            sums[state, j] = costs[item] if item != NONE else 0.0
        spread[state] = sums[state, 0] - sums[state, k - 1]
    for item in range(n):
        follows[item] = NONE
    _make_heap(heap, spread)
    while size > 1:
        widest = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, 0, size, spread)
        other = heap[0]
        for j in range(k):
            opposite = k - 1 - j
            joined[j] = sums[widest, j] + sums[other, opposite]
            joined_first[j], joined_last[j] = first[widest, j], last[widest, j]
            if first[widest, j] == NONE:
                joined_first[j] = first[other, opposite]
            elif first[other, opposite] != NONE:
                follows[last[widest, j]] = first[other, opposite]
            if first[other, opposite] != NONE:
                joined_last[j] = last[other, opposite]
        _make_heap(order, joined)
        for j in range(k):
            largest = order[0]
            order[0] = order[k - 1 - j]
            _sift_down(order, 0, k - 1 - j, joined)
            sums[other, j] = joined[largest]
            first[other, j], last[other, j] = joined_first[largest], joined_last[largest]
        spread[other] = sums[other, 0] - sums[other, k - 1]
        _sift_down(heap, 0, size, spread)
    if n:
        for j in range(k):
            item = first[heap[0], j]
            while item != NONE:
                group[item] = j
                item = follows[item]
    return group


@njit("int64[::1](float64[::1], int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def largest_first(costs: Any, k: int) -> Any:
    """Groups by handing each item to the group with the smallest sum so far (longest processing time first: Graham, 1969)."""
    group, heap, owed = np.empty(len(costs), np.int64), np.empty(k, np.int64), np.empty(k)
    for g in range(k):
        owed[g] = 0.0
    _make_heap(heap, owed)
    for item in range(len(costs)):
        group[item] = heap[0]
        owed[heap[0]] -= costs[item]
        _sift_down(heap, 0, k, owed)
    return group


@njit("void(int64, int64, int64, int64[::1], int64[::1], int64[::1])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _hand_over(item: int, giver: int, taker: int, first: Any, follows: Any, group: Any) -> None:
    """Move an item from one group's chain to its place in another's."""
    before, at = NONE, first[giver]
    while at != item:
        before, at = at, follows[at]
    if before == NONE:
        first[giver] = follows[item]
    else:
        follows[before] = follows[item]
    before, at = NONE, first[taker]
    while at != NONE and at < item:
        before, at = at, follows[at]
    follows[item] = at
    if before == NONE:
        first[taker] = item
    else:
        follows[before] = item
    group[item] = taker


@njit("void(float64[::1], int64[::1], int64, int64, int64, int64[::1], int64, float64, int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def refine(
    costs: Any, group: Any, k: int, min_size: int, max_size: int, tokens: Any, budget: int, floor: float, max_steps: int
) -> None:
    """Lower the largest sum by moves and swaps between its group and another, in place, as long as one helps.

    Each brings the two sums as close together as one item for at most one item can; groups keep min_size..max_size items and at
    most `budget` of `tokens`. Over where no sum is above `floor`, the least that the largest can be."""
    n = len(costs)
    follows, first, heap = np.empty(n, np.int64), np.empty(k, np.int64), np.empty(k, np.int64)
    sizes, filled, sums, lowness = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k), np.empty(k)
    for g in range(k):
        first[g], sizes[g], filled[g], sums[g] = NONE, 0, 0, 0.0
    for item in range(n - 1, -1, -1):  # each group is a chain of its items in the order of all items
        g = group[item]
        follows[item] = first[g]
        first[g] = item
        sizes[g] += 1
        filled[g] += tokens[item]
        sums[g] += costs[item]
    for _ in range(max_steps):
        high = 0
        for g in range(k):
            lowness[g] = -sums[g]
            if sums[g] > sums[high]:
                high = g
        if sums[high] <= floor:
            return
        found = False
        item_down, item_up = NONE, NONE
        _make_heap(heap, lowness)
        size = k
        while size > 1 and not found:
            low = heap[0]
            gap = sums[high] - sums[low]
            if gap <= 1e-12 * sums[high]:
                break
            size -= 1
            heap[0] = heap[size]
            _sift_down(heap, 0, size, lowness)
            may_move = sizes[high] > min_size and sizes[low] < max_size
            apart = 1.0 - 1e-9  # what remains of the gap
            before, other = NONE, first[low]
            item = first[high]
            while item != NONE:
                # Costs fall along both chains: one walk passes, for each item, those that would bring the sums to the middle.
                wanted = costs[item] - gap / 2
                while other != NONE and costs[other] >= wanted:
                    before, other = other, follows[other]
                for which in range(3):
                    rival = before if which == 0 else other if which == 1 else NONE
                    if rival == NONE and not (which == 2 and may_move):
                        continue
                    less, more = costs[item], tokens[item]
                    if rival != NONE:
                        less -= costs[rival]
                        more -= tokens[rival]
                    remains = abs(gap - 2 * less) / gap
                    if remains < apart and filled[low] + more <= budget and filled[high] - more <= budget:
                        found, apart, item_down, item_up = True, remains, item, rival
                item = follows[item]
        if not found:
            return
        less, more = costs[item_down], tokens[item_down]
        _hand_over(item_down, high, low, first, follows, group)
        if item_up != NONE:
            less -= costs[item_up]
            more -= tokens[item_up]
            _hand_over(item_up, low, high, first, follows, group)
        else:
            sizes[high] -= 1
            sizes[low] += 1
        filled[high] -= more
        filled[low] += more
        sums[high] -= less
        sums[low] += less


@njit("int64[::1](int64[::1], int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def first_fit(lengths: Any, budget: int) -> Any:
    """Groups by handing each item to the first group with room for it: first-fit decreasing (Johnson, 1973) of sorted items.

    No item is above the budget. A tree over the groups knows the largest room below each node, so an item costs log(n)."""
    n = len(lengths)
    leaves = 1
    while leaves < n:
        leaves *= 2
    group, room = np.empty(n, np.int64), np.empty(2 * leaves, np.int64)
    for node in range(2 * leaves):
        room[node] = budget
    for item in range(n):
        length = lengths[item]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        group[item] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return group


@njit("int64[::1](int64[::1], int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def fullest_fit(lengths: Any, budget: int) -> Any:
    """Groups made one after the other: the longest item left, then again and again the one that can fill the room best, alone or
    with one other behind it. Often fuller than `first_fit`, but an item costs a walk over all that are left."""
    n = len(lengths)
    group, follows, precedes = np.empty(n, np.int64), np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    for i in range(n + 1):  # what is left, longest first, is a ring through n
        follows[i], precedes[i] = (i + 1) % (n + 1), (i + n) % (n + 1)
    g = NONE
    while follows[n] != n:
        g += 1
        item, room = follows[n], budget
        while item != n:
            group[item] = g
            room -= lengths[item]
            follows[precedes[item]], precedes[follows[item]] = follows[item], precedes[item]
            item = follows[n]
            while item != n and lengths[item] > room:
                item = follows[item]
            if item == n or lengths[item] == room:
                continue
            fullest = lengths[item]
            longer, shorter = item, precedes[n]
            while longer != n and shorter > longer:
                both = lengths[longer] + lengths[shorter]
                if both > room:
                    longer = follows[longer]
                    continue
                if both > fullest:
                    fullest, item = both, longer
                shorter = precedes[shorter]
    return group
