#pragma once

// Sets of positions, stored as ascending, disjoint ranges [first, second).

#include "llama-kv-block.h"

#include <cstdint>

// Adds [p0, p1) to the set; does nothing when the range is empty.
void server_ranges_add(llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// Removes [p0, p1) from the set; does nothing when the range is empty.
void server_ranges_remove(llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// Returns how many positions of [p0, p1) are in the set.
int32_t server_ranges_count(const llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// Returns how many positions are in the set.
int32_t server_ranges_size(const llama_kv_ranges & set);

// Makes a set of ranges in any order, which may overlap or be empty. Takes O(n log n) steps.
llama_kv_ranges server_ranges_normalized(llama_kv_ranges ranges);

// Returns `set` without the positions of `other`. Takes as many steps as both have ranges.
llama_kv_ranges server_ranges_without(const llama_kv_ranges & set, const llama_kv_ranges & other);

// Returns whether all of [p0, p1) is in the set; true for an empty range. Takes O(log n) steps.
bool server_ranges_contain(const llama_kv_ranges & set, llama_pos p0, llama_pos p1);

// Returns whether any position of [p0, p1) is in the set. Takes O(log n) steps.
bool server_ranges_overlap(const llama_kv_ranges & set, llama_pos p0, llama_pos p1);
