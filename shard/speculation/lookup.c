// The index of one text: for each length, a hash table of where sequences of so many tokens last ended (lookup.py).
#include <stdint.h>
#include <string.h>

#define BASE 0x9E3779B97F4A7C15ull

typedef struct {
    uint32_t *tokens;     // [at least num_tokens]
    uint32_t *tables;     // [longest - shortest + 1, num_entries] where a sequence ends in `tokens`, 0 for none
    int64_t num_entries;  // a power of two, more than num_tokens
    int64_t num_tokens, start, shortest, longest, match_end, match_length;
    uint64_t factor;      // odd and unknown to clients: else a prompt could be written whose sequences share their places
} Text;

// The entry of the `length` tokens before `end`: theirs, or an empty one.
static inline uint32_t *entry(const Text *text, uint64_t hash, int64_t end, int64_t length) {
    uint32_t *table = text->tables + (length - text->shortest) * text->num_entries;
    const uint32_t *sequence = text->tokens + end - length;
    uint64_t last = text->num_entries - 1, at = hash * text->factor >> 32 & last;
    while (table[at] && memcmp(text->tokens + table[at] - length, sequence, length * sizeof *sequence))
        at = (at + 1) & last;
    return table + at;
}

// `count` more tokens are in `tokens`. Notes in match_length the length of the longest match of the last one, 0 without one, and in
// match_end where its continuation begins, -1 without one.
void lookup_extend(Text *text, int64_t count) {
    while (count--) {
        int64_t end = ++text->num_tokens, known = end > text->start ? end - text->start : end;
        int64_t deepest = known < text->longest ? known : text->longest;
        uint64_t hash = 0, weight = 1;
        text->match_end = -1, text->match_length = 0;
        for (int64_t length = 1; length <= deepest; length++, weight *= BASE) {
            hash += (text->tokens[end - length] + 1ull) * weight;
            if (length < text->shortest)
                continue;
            uint32_t *found = entry(text, hash, end, length);
            if (*found)
                text->match_end = *found, text->match_length = length;
            *found = (uint32_t)end;
        }
    }
}

// Writes at most `most` tokens that follow the match into `drafts`. Returns their number. What follows a match in the first text
// stops where that ends; a match that reaches the newest token goes on from its beginning.
int64_t lookup_propose(const Text *text, int64_t most, uint32_t *drafts) {
    int64_t first = text->match_end;
    if (first < 0)
        return 0;
    int64_t num_known = (first <= text->start ? text->start : text->num_tokens) - first;
    int64_t num_drafts = first <= text->start && num_known < most ? num_known : most;
    for (int64_t i = 0; i < num_drafts; i++)
        drafts[i] = text->tokens[first + i % num_known];
    return num_drafts;
}

// Extends `num_texts` texts, which have room, by counts[i] of the `tokens` each, and writes what each proposes next, at most most[i]
// tokens, into its `width` places of `drafts`, their number and the length of its match.
void lookup_follow(Text *const *texts, int64_t num_texts, const int64_t *counts, const int64_t *tokens, const int64_t *most,
                   int64_t width, uint32_t *drafts, int64_t *num_drafts, int64_t *match_lengths) {
    for (int64_t i = 0; i < num_texts; i++, drafts += width) {
        Text *text = texts[i];
        for (int64_t at = 0; at < counts[i]; at++)
            text->tokens[text->num_tokens + at] = (uint32_t)*tokens++;
        lookup_extend(text, counts[i]);
        num_drafts[i] = lookup_propose(text, most[i], drafts);
        match_lengths[i] = text->match_length;
    }
}
