#pragma once

// Cuts text before std::regex splits it into words for the tokenizer.
//
// std::regex uses about 320 bytes of stack for each character of a match. A word, a line of dashes or a gap of 26,000
// characters overflows the 8 MiB of a thread, and the process ends. Vocabularies whose expressions llama.cpp has no code of
// its own for have this error: those of gpt-oss, DeepSeek, Mistral Nemo and others.

#include <cstddef>
#include <string>
#include <vector>

// Longest run, in characters, of white space or of anything else that is left whole. Twice as much, because an expression
// can match characters and the white space behind them, takes 1.3 MiB: where the stack has no limit (`ulimit -s`), threads
// have 2 MiB.
constexpr size_t LLAMA_MAX_RUN = 2048;

enum class llama_char_kind { space, letter, digit, other };

// Returns the kind of a character of the texts that unicode_regex_split() makes: characters beyond ASCII are 0x0B for white
// space, and in texts of `char` 0xD1 for digits and 0xD2 for letters.
template <typename CharT>
llama_char_kind llama_kind_of(CharT c) {
    if (c == ' ' || (c >= '\t' && c <= '\r')) {
        return llama_char_kind::space;
    }
    if ((c >= '0' && c <= '9') || c == (CharT) (char) 0xD1) {
        return llama_char_kind::digit;
    }
    const bool is_wide = sizeof(CharT) > 1 && c > 0x7F;
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == (CharT) (char) 0xD2 || is_wide;
    return is_letter ? llama_char_kind::letter : llama_char_kind::other;
}

// Returns the lengths of consecutive parts of a text, `lengths`, with longer runs than LLAMA_MAX_RUN cut: behind the last
// word or number in them, where most expressions end a match, so that the tokens stay the same; else after that many
// characters.
template <typename CharT>
std::vector<size_t> llama_cut_runs(const std::basic_string<CharT> & text, const std::vector<size_t> & lengths) {
    using kind = llama_char_kind;
    std::vector<size_t> res;
    res.reserve(lengths.size());
    size_t begin = 0; // of the part
    for (const size_t length : lengths) {
        const size_t end = begin + length;
        size_t first = begin; // of the run
        size_t good  = begin; // the last good place for a cut in it; `first`: there is none
        kind   last  = kind::space;
        for (size_t i = begin; i < end; ++i) {
            const kind now = llama_kind_of(text[i]);
            if (i == begin || (now == kind::space) != (last == kind::space)) {
                first = good = i;
            } else if (now != last && (last == kind::letter || last == kind::digit) && text[i] != '\'') {
                good = i;
            }
            if (i - first == LLAMA_MAX_RUN) {
                first = good = good > first ? good : i;
                res.push_back(first - begin);
                begin = first;
            }
            last = now;
        }
        res.push_back(end - begin);
        begin = end;
    }
    return res;
}
