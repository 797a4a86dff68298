// llama.cpp to compare with: run_llamacpp THREADS FILE.gguf. Commands and answers as in answer.py; how to build it says README.md.
// What it measures is what llama-bench and llama-batched-bench do, but prompts of a batch are computed once, not in every round.

#include "llama.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kMany = 32, kSpare = 64, kShort = 256 + kSpare, kLong = 4096 + kSpare, kBatch = 2048;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void fail(const char * what) {
    std::fprintf(stderr, "run_llamacpp: %s\n", what);
    std::exit(1);
}

std::vector<llama_token> prompt(int length, int number) {  // as in answer.py
    std::vector<llama_token> ids;
    for (long at = 0; at < length; ++at) ids.push_back(llama_token(1000 + (at * 7919 + number * 104729L) % 30000));
    return ids;
}

// A context of some sequences, and how long a prompt each of them holds.
struct Sequences {
    llama_context * context;
    llama_batch batch = llama_batch_init(kBatch, 0, 1);
    std::vector<int> held;
    int vocab;

    Sequences(llama_model * model, int count, int room, int threads) : held(count, 0) {
        auto params = llama_context_default_params();
        params.n_ctx = uint32_t(count * room);
        params.n_batch = kBatch;
        params.n_seq_max = uint32_t(count);
        params.n_threads = params.n_threads_batch = threads;
        params.kv_unified = false;
        context = llama_init_from_model(model, params);
        if (!context) fail("no context");
        vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    void add(llama_token token, int position, int sequence, bool logits) {
        const int at = batch.n_tokens++;
        batch.token[at] = token;
        batch.pos[at] = position;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = sequence;
        batch.logits[at] = logits;
    }

    void compute() {
        if (llama_decode(context, batch)) fail("llama_decode failed");
        llama_synchronize(context);
    }

    llama_token likeliest(int row) const {
        const float * logits = llama_get_logits_ith(context, row);
        int best = 0;
        for (int token = 1; token < vocab; ++token)
            if (logits[token] > logits[best]) best = token;
        return best;
    }

    double text(int sequence, const std::vector<llama_token> & ids) {
        llama_memory_seq_rm(llama_get_memory(context), sequence, 0, -1);
        const auto start = Clock::now();
        for (size_t begin = 0; begin < ids.size(); begin += kBatch) {
            const size_t end = std::min(begin + kBatch, ids.size());
            batch.n_tokens = 0;
            for (size_t at = begin; at < end; ++at) add(ids[at], int(at), sequence, at + 1 == ids.size());
            compute();
        }
        likeliest(-1);
        held[sequence] = int(ids.size());
        return seconds_since(start);
    }

    double decode(int count, int length, int steps) {
        std::vector<llama_token> last(count, 1000);
        for (int sequence = 0; sequence < count; ++sequence) {
            if (held[sequence] != length) text(sequence, prompt(length, sequence + 2));
            llama_memory_seq_rm(llama_get_memory(context), sequence, length, -1);
        }
        const auto start = Clock::now();
        for (int step = 0; step < steps; ++step) {
            batch.n_tokens = 0;
            for (int sequence = 0; sequence < count; ++sequence) add(last[sequence], length + step, sequence, true);
            compute();
            for (int sequence = 0; sequence < count; ++sequence) last[sequence] = likeliest(sequence);
        }
        return seconds_since(start);
    }

    double score(const std::vector<llama_token> & ids) {
        llama_memory_seq_rm(llama_get_memory(context), 0, 0, -1);
        held[0] = 0;
        double sum = 0;
        constexpr size_t part = 256;  // logits of so many rows fit in memory
        for (size_t begin = 0; begin + 1 < ids.size(); begin += part) {
            const size_t end = std::min(begin + part, ids.size() - 1);
            batch.n_tokens = 0;
            for (size_t at = begin; at < end; ++at) add(ids[at], int(at), 0, true);
            compute();
            for (size_t at = begin; at < end; ++at) {
                const float * logits = llama_get_logits_ith(context, int(at - begin));
                double most = logits[0], total = 0;
                for (int token = 1; token < vocab; ++token) most = std::max(most, double(logits[token]));
                for (int token = 0; token < vocab; ++token) total += std::exp(logits[token] - most);
                sum += most + std::log(total) - logits[ids[at + 1]];
            }
        }
        return sum / double(ids.size() - 1);
    }
};

long field(const std::string & line, const std::string & name) {
    const auto found = line.find("\"" + name + "\": ");
    if (found == std::string::npos) fail(line.c_str());
    return std::atol(line.c_str() + found + name.size() + 4);
}

std::vector<llama_token> ids_of(const std::string & line) {
    std::vector<llama_token> ids;
    const char * at = line.c_str() + line.find('[') + 1;
    for (char * end; *at && *at != ']'; at = *end == ',' ? end + 1 : end) ids.push_back(llama_token(std::strtol(at, &end, 10)));
    return ids;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) fail("give THREADS and FILE.gguf");
    const int threads = std::atoi(argv[1]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model * model = llama_model_load_from_file(argv[2], llama_model_default_params());
    if (!model) fail("the model cannot be loaded");
    char form[128];
    llama_model_desc(model, form, sizeof form);
    Sequences many(model, kMany, kShort, threads), one(model, 2, kLong, threads);
    std::printf("{\"version\": \"%s\", \"weights\": \"%s, times 8 bits in groups of 32; KV f16\"}\n", LLAMA_BUILT, form);
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        double found;
        if (line.find("\"prefill\"") != std::string::npos) {
            found = one.text(0, ids_of(line));
        } else if (line.find("\"score\"") != std::string::npos) {
            found = one.score(ids_of(line));
        } else {
            const int batch = int(field(line, "batch")), context = int(field(line, "context")), steps = int(field(line, "steps"));
            found = batch == 1 && context > 256 ? one.decode(1, context, steps) : many.decode(batch, context, steps);
        }
        std::printf("%.9g\n", found);
        std::fflush(stdout);
    }
}
