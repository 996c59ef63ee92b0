// The hash table of history.py: where sequences of tokens last ended in the outputs of earlier requests.
#include <stdint.h>
#include <string.h>

#define END 0xFFFFFFFFu
#define BASE 0x9E3779B97F4A7C15ull
#define MIX 0xD1B54A32D192ED03ull

typedef struct {
    uint32_t *tokens;        // [num_blocks * block] token ids; END follows each output
    uint32_t *table;         // [num_entries] where a sequence ends in `tokens`, 0 for none
    const int64_t *owners;   // [num_blocks] the text that a block belongs to
    const int32_t *lengths;  // [num_lengths] tokens of the sequences, ascending
    int64_t num_entries, num_lengths, block;
} Index;

// The entry of a hash value, in the manner of Lemire 2019, "Fast random integer generation in an interval".
static inline uint32_t *entry(const Index *index, uint64_t hash, uint64_t text) {
    uint64_t mixed = (hash ^ text * MIX) * MIX;
    return index->table + (uint64_t)(((unsigned __int128)mixed * (uint64_t)index->num_entries) >> 64);
}

// ids: [count], written at `first` of `tokens`, within one block, and followed by END.
void history_add(const Index *index, int64_t text, const uint32_t *ids, int64_t count, int64_t first) {
    memcpy(index->tokens + first, ids, count * sizeof *ids);
    index->tokens[first + count] = END;
    for (int64_t last = 0; last < count; last++) {
        uint64_t hash = 0, weight = 1;
        int64_t length = 0;
        for (int64_t at = 0; at < index->num_lengths && index->lengths[at] <= last + 1; at++) {
            for (; length < index->lengths[at]; length++, weight *= BASE)
                hash += (ids[last - length] + 1ull) * weight;
            *entry(index, hash, text) = (uint32_t)(first + last + 1);
        }
    }
}

// suffix: [count], the newest tokens. Writes at most `most` tokens that followed the longest match into `drafts`, and the length
// of the match into `length`. Returns their number.
int64_t history_propose(
    const Index *index, int64_t text, const uint32_t *suffix, int64_t count, int64_t most, uint32_t *drafts,
    int64_t *length) {
    uint64_t hashes[64], hash = 0, weight = 1;
    int64_t num_hashes = 0, known = 0;
    for (; num_hashes < index->num_lengths && index->lengths[num_hashes] <= count; num_hashes++) {
        for (; known < index->lengths[num_hashes]; known++, weight *= BASE)
            hash += (suffix[count - 1 - known] + 1ull) * weight;
        hashes[num_hashes] = hash;
    }
    while (num_hashes--) {
        int64_t end = *entry(index, hashes[num_hashes], text), size = index->lengths[num_hashes], found = 0;
        if (end < size || index->owners[(end - 1) / index->block] != text)
            continue;
        if (memcmp(index->tokens + end - size, suffix + count - size, size * sizeof *suffix))
            continue;
        while (found < most && index->tokens[end + found] != END) {
            drafts[found] = index->tokens[end + found];
            found++;
        }
        if (found) {
            *length = size;
            return found;
        }
    }
    return 0;
}
