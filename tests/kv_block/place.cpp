// Tests llama-kv-place: the cells of sequences that are decoded side by side.
// usage: place MODEL (not read); prints one line per check; exit status 1 after the first that fails

#include "llama-kv-place.h"

#include "llama-batch.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

static void expect(bool fact, const std::string & what) {
    printf("%s: %s\n", fact ? "ok" : "NOT SO", what.c_str());
    if (!fact) {
        exit(1);
    }
}

// Cells, and the next position of each sequence.
struct cache {
    llama_kv_cells cells;
    std::map<llama_seq_id, llama_pos> next;

    explicit cache(uint32_t n) { cells.resize(n); }

    // Decodes a batch with one token for each element. Returns whether there were cells.
    bool decode(std::vector<llama_seq_id> seqs) {
        std::vector<llama_seq_id *> ids;
        for (auto & seq : seqs) {
            ids.push_back(&seq);
        }
        llama_ubatch ubatch = {};
        ubatch.n_tokens = (uint32_t) seqs.size();
        ubatch.seq_id   = ids.data();
        std::vector<uint32_t> chosen;
        if (!llama_kv_place(cells, ubatch, chosen)) {
            if (!chosen.empty()) {
                expect(false, "a refused batch gets no cells");
            }
            return false;
        }
        if (chosen.size() != seqs.size()) {
            expect(false, "each token gets a cell");
        }
        for (size_t i = 0; i < chosen.size(); ++i) {
            if (!cells.is_empty(chosen[i])) {
                expect(false, "a cell is empty, and no other token gets it");
            }
            cells.pos_set(chosen[i], next[seqs[i]]++);
            cells.seq_add(chosen[i], seqs[i]);
        }
        return true;
    }

    void evict(llama_seq_id seq, llama_pos p0, llama_pos p1) {
        const auto rows = cells.seq_pos_get(seq);
        for (const auto & [pos, cell] : rows) {
            if (pos >= p0 && pos < p1) {
                cells.seq_rm(cell, seq);
            }
        }
    }

    // The runs of cells of the rows [p0, p1) of a sequence.
    size_t n_runs(llama_seq_id seq, llama_pos p0, llama_pos p1) const {
        size_t n = 0;
        uint32_t last = 0;
        for (const auto & [pos, cell] : cells.seq_pos_get(seq)) {
            if (pos >= p0 && pos < p1) {
                n += n == 0 || cell != last + 1;
                last = cell;
            }
        }
        return n;
    }
};

int main() {
    {
        cache kv(2048);
        for (llama_seq_id seq = 0; seq < 4; ++seq) {
            kv.decode(std::vector<llama_seq_id>(100, seq));
        }
        for (int i = 0; i < 300; ++i) {
            kv.decode({ 0, 1, 2, 3 });
        }
        size_t most = 0;
        for (llama_seq_id seq = 0; seq < 4; ++seq) {
            for (llama_pos p0 = 0; p0 + 64 <= 400; ++p0) {
                most = std::max(most, kv.n_runs(seq, p0, p0 + 64));
            }
        }
        expect(most <= 2, "64 rows of four sequences that generate are at most two runs");
        expect(kv.cells.used_max_p1() <= 1600 + 4*LLAMA_KV_PLACE_ROOM, "and few cells are left empty between them");
    }
    {
        cache kv(512);
        for (int i = 0; i < 128; ++i) {
            kv.decode({ 0, 1, 2, 3 });
        }
        expect(kv.cells.get_used() == 512, "the last cell is used");
        expect(!kv.decode({ 0 }), "a batch without cells is refused");
        kv.evict(1, 10, 74);
        for (int i = 0; i < 32; ++i) {
            kv.decode({ 0, 2 });
        }
        expect(kv.n_runs(0, 128, 160) <= 2 && kv.n_runs(2, 128, 160) <= 3, "two sequences share freed cells in few runs");
        expect(!kv.decode({ 0, 0 }), "and fill them");
    }
    { // random batches and evictions: every empty cell can be used, and none twice
        cache kv(300);
        std::mt19937 random(3);
        size_t n_decoded = 0, n_refused = 0;
        for (int i = 0; i < 3000; ++i) {
            std::vector<llama_seq_id> batch(1 + random() % 20);
            for (auto & seq : batch) {
                seq = (llama_seq_id) (random() % 6);
            }
            const uint32_t n_free = kv.cells.size() - kv.cells.get_used();
            if (kv.decode(batch) != (batch.size() <= n_free)) {
                expect(false, "a batch is refused only where cells are missing");
            }
            batch.size() <= n_free ? n_decoded++ : n_refused++;
            while (batch.size() > kv.cells.size() - kv.cells.get_used()) {
                const llama_seq_id seq = (llama_seq_id) (random() % 6);
                const llama_pos p0 = (llama_pos) (random() % (kv.next[seq] + 1));
                kv.evict(seq, p0, p0 + 40);
            }
        }
        expect(n_decoded > 1000 && n_refused > 50, std::to_string(n_decoded) + " batches got cells, " + std::to_string(n_refused) + " were refused");
    }
    return 0;
}
