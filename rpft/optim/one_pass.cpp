// AdamW over flat host tensors, every byte read and written once. Python's side is one_pass.py.
//
// A loop a combination of types, which the compiler turns into vector code: plain C++, so that it compiles in a
// second or two; for one format of the moments, STATE_FORMAT. No element's result depends on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Bfloat16 {
    uint16_t bits;
};

inline float widened(float value) { return value; }
inline float widened(Bfloat16 value) { return as_float(uint32_t(value.bits) << 16); }

// A gradient with one use, or the float32 sum of two: those of a tied weight.
template <class T>
struct OneUse {
    const T* first;
    float operator()(int64_t i) const { return widened(first[i]); }
};

template <class T>
struct TwoUses {
    const T *first, *second;
    float operator()(int64_t i) const { return widened(first[i]) + widened(second[i]); }
};

// Where a float32 master is read and written, and what else becomes of it. What is written may be what was read.
struct Alone {
    const float* before;
    float* after;
    float read(int64_t i) const { return before[i]; }
    void write(int64_t i, float value) const { after[i] = value; }
};

struct WithWorking {
    float* master;
    uint16_t* working;
    float read(int64_t i) const { return master[i]; }
    void write(int64_t i, float value) const {
        master[i] = value;
        const uint32_t bits = as_bits(value);
        const uint32_t to_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        working[i] = uint16_t(value == value ? to_even : 0x7fc0u);
    }
};

// model/split_float.py says what this is.
struct Split {
    const uint16_t* before;
    uint16_t* after;
    uint16_t* remainder;
    float read(int64_t i) const {
        return as_float((uint32_t(before[i]) << 16) + uint32_t(int32_t(int16_t(remainder[i]))));
    }
    void write(int64_t i, float value) const {
        const uint32_t bits = as_bits(value);
        const uint32_t high = (bits + 0x8000u) >> 16;
        after[i] = uint16_t(high);
        remainder[i] = uint16_t(bits - (high << 16));
    }
};

struct Numbers {
    float scale, keep, new1, old2, new2, step_size, correction2, eps;

    float first(float old, float gradient) const { return old + (gradient - old) * new1; }
    float second(float old, float gradient) const { return old * old2 + gradient * gradient * new2; }
    float master(float old, float first, float second) const {
        return old * keep - step_size * first / (std::sqrt(second) * correction2 + eps);
    }
};

// How moments are stored; kernels.py fills it. model/moments.py says what the formats are.
struct State {
    void *exp_avg, *exp_avg_sq;
    float *exp_avg_scale, *exp_avg_sq_scale;
    const float *signed_values, *unsigned_values;      // of the 8-bit maps
    const int32_t *signed_search, *unsigned_search;    // model/dynamic_map.py says what these are
    int64_t first_place;                               // of the first element in its layer
    uint32_t key_low, key_high;                        // of an update: filled here
};

struct WholeMoments {
    float *exp_avg, *exp_avg_sq;
    explicit WholeMoments(const State& s)
        : exp_avg(static_cast<float*>(s.exp_avg)), exp_avg_sq(static_cast<float*>(s.exp_avg_sq)) {}
    float first(int64_t i) const { return exp_avg[i]; }
    float second(int64_t i) const { return exp_avg_sq[i]; }
    void write(int64_t i, float first, float second) const {
        exp_avg[i] = first;
        exp_avg_sq[i] = second;
    }
};

// As `draws` of model/dropout.py: an element's random bits depend on its place and the key only.
struct Draws {
    int64_t first_place;
    uint32_t low, high;
    uint32_t operator()(int64_t i) const {
        const uint64_t place = uint64_t(first_place + i);
        uint32_t x = (uint32_t(place) ^ low) + uint32_t(place >> 32) * 0x9e37u;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = x ^ (x >> 15) ^ high;
        x = (x ^ (x >> 16)) * 0x2c1b3c6du;
        x = x ^ (x >> 15) ^ low;
        x = (x ^ (x >> 16)) * 0x297a2d39u;
        return x ^ (x >> 15) ^ high;
    }
};

// Rounded to one of the two neighbours, by chance, so that what is too small for one step is not lost in many.
struct RoundedMoments {
    uint16_t *exp_avg, *exp_avg_sq;
    Draws draws;
    explicit RoundedMoments(const State& s)
        : exp_avg(static_cast<uint16_t*>(s.exp_avg)),
          exp_avg_sq(static_cast<uint16_t*>(s.exp_avg_sq)),
          draws{s.first_place, s.key_low, s.key_high} {}
    float first(int64_t i) const { return as_float(uint32_t(exp_avg[i]) << 16); }
    float second(int64_t i) const { return as_float(uint32_t(exp_avg_sq[i]) << 16); }
    void write(int64_t i, float first, float second) const {
        const uint32_t drawn = draws(i);
        exp_avg[i] = rounded(first, drawn & 0xffffu);
        exp_avg_sq[i] = rounded(second, drawn >> 16);
    }
    static uint16_t rounded(float value, uint32_t drawn) {
        const uint32_t bits = as_bits(value);
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        return uint16_t((bits + (finite ? drawn : 0u)) >> 16);
    }
};

template <class Gradient, class Master, class Moments>
void update(int64_t n, Gradient gradients, Master master, Moments moments, Numbers k) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const float gradient = gradients(i) * k.scale;
        const float first = k.first(moments.first(i), gradient);
        const float second = k.second(moments.second(i), gradient);
        moments.write(i, first, second);
        master.write(i, k.master(master.read(i), first, second));
    }
}

constexpr int64_t BLOCK = 256;
constexpr uint32_t LARGEST = 0x7f7fffffu;  // finite float
constexpr int32_t LEAST = ((127 - 22) << 7) - 1;

// Loads one by one: processors' instructions that gather them take longer.
#ifdef __clang__
#define ONE_BY_ONE __attribute__((noinline))
#else
#define ONE_BY_ONE __attribute__((noinline, optimize("no-tree-vectorize")))
#endif

template <class Index, class Value>
ONE_BY_ONE void look_up(int64_t n, const Index* index, const Value* table, Value* out) {
#ifdef __clang__
#pragma clang loop vectorize(disable)
#endif
    for (int64_t i = 0; i < n; ++i) out[i] = table[index[i]];
}

// Values of a block over the largest magnitude, as the bits of floats, and what a search table says of them.
struct Search {
    uint32_t scaled[BLOCK];
    uint16_t entry[BLOCK];
    int32_t found[BLOCK];

    // Gives the largest magnitude.
    float run(int64_t n, const float* values, const int32_t* table) {
        uint32_t most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t magnitude = as_bits(values[i]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
        const float largest = as_float(most), over = most ? largest : 1.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            scaled[i] = as_bits(values[i] / over);
            const int32_t upper = int32_t((scaled[i] & 0x7fffffffu) >> 16) - LEAST;
            entry[i] = uint16_t(upper > 0 ? upper : 0);
        }
        look_up(n, entry, table, found);
        return largest;
    }
    // How many values of the map, counted from its zero, there are up to the nearest.
    int32_t count(int64_t i) const {
        const int32_t count = (found[i] >> 16) + ((scaled[i] & 0xffffu) > (uint32_t(found[i]) & 0xffffu));
        return scaled[i] << 1 ? count : 0;
    }
};

// Moments of 8 bits: a block is read, updated in float32, and written with its own scale.
template <class Gradient, class Master>
void update_blocks(int64_t n, Gradient gradients, Master master, const State& s, Numbers k) {
    auto *exp_avg = static_cast<uint8_t*>(s.exp_avg), *exp_avg_sq = static_cast<uint8_t*>(s.exp_avg_sq);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < (n + BLOCK - 1) / BLOCK; ++block) {
        const int64_t start = block * BLOCK, length = n - start < BLOCK ? n - start : BLOCK;
        const float scale1 = s.exp_avg_scale[block], scale2 = s.exp_avg_sq_scale[block];
        float first[BLOCK], second[BLOCK];
        look_up(length, exp_avg + start, s.signed_values, first);
        look_up(length, exp_avg_sq + start, s.unsigned_values, second);
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            const float gradient = gradients(start + j) * k.scale;
            first[j] = k.first(first[j] * scale1, gradient);
            const uint32_t square = as_bits(k.second(second[j] * scale2, gradient));
            second[j] = as_float(square < LARGEST ? square : LARGEST);
            master.write(start + j, k.master(master.read(start + j), first[j], second[j]));
        }
        Search search1, search2;
        s.exp_avg_scale[block] = search1.run(length, first, s.signed_search);
        s.exp_avg_sq_scale[block] = search2.run(length, second, s.unsigned_search);
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            const int32_t count = search1.count(j), below = count < 127 ? count : 127;
            exp_avg[start + j] = uint8_t(search1.scaled[j] >> 31 ? -below : count);
            exp_avg_sq[start + j] = uint8_t(search2.count(j));
        }
    }
}

enum Format { FP32, BF16, EIGHT_BIT };  // in the order of model/moments.py

template <class Gradient, class Master>
void update_as(int64_t n, Gradient gradients, Master master, const State& state, Numbers k) {
    if constexpr (STATE_FORMAT == FP32)
        update(n, gradients, master, WholeMoments(state), k);
    else if constexpr (STATE_FORMAT == BF16)
        update(n, gradients, master, RoundedMoments(state), k);
    else
        update_blocks(n, gradients, master, state, k);
}

// Partial sums of a row: the fewer terms in each, the smaller the error, on any machine's vectors.
constexpr int64_t LANES = 64;

template <class Gradient>
void square_rows(int64_t rows, int64_t length, Gradient gradients, float* sums) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float lanes[LANES] = {};
        for (int64_t start = row * length; start < (row + 1) * length; start += LANES) {
#pragma omp simd
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const float gradient = gradients(start + lane);
                lanes[lane] += gradient * gradient;
            }
        }
        float sum = 0;
        for (float lane : lanes) sum += lane;
        sums[row] = sum;
    }
}

// Calls `use` with the gradient of the right type.
template <class Use>
void with_gradients(const void* first, const void* second, int bfloat16, Use use) {
    if (bfloat16) {
        const auto *a = static_cast<const Bfloat16*>(first), *b = static_cast<const Bfloat16*>(second);
        b ? use(TwoUses<Bfloat16>{a, b}) : use(OneUse<Bfloat16>{a});
    } else {
        const auto *a = static_cast<const float*>(first), *b = static_cast<const float*>(second);
        b ? use(TwoUses<float>{a, b}) : use(OneUse<float>{a});
    }
}

}  // namespace

// Elements that are updated alike; kernels.py fills it. Null: `second`, a gradient with one use; `remainder`, masters are
// whole. `before` and `after` are working weights: of bfloat16, or, where there is no `master`, of float32, which are
// masters themselves. Null `after`: none are written.
struct Part {
    int64_t n;
    const void *first, *second;
    const void* before;
    void* after;
    float* master;
    uint16_t* remainder;
    State state;
    int32_t bfloat16_gradients;
};

// `numbers` has a set a part.
extern "C" void adamw(int64_t parts, const Part* part, const Numbers* numbers, uint32_t key_low, uint32_t key_high) {
    for (int64_t i = 0; i < parts; ++i) {
        const Part p = part[i];
        const Numbers k = numbers[i];
        State state = p.state;
        state.key_low = key_low;
        state.key_high = key_high;
        with_gradients(p.first, p.second, p.bfloat16_gradients, [&](auto gradients) {
            auto* working = static_cast<uint16_t*>(p.after);
            if (p.remainder) {
                const auto* old = static_cast<const uint16_t*>(p.before);
                update_as(p.n, gradients, Split{old, working, p.remainder}, state, k);
            } else if (!p.master) {
                const auto* old = static_cast<const float*>(p.before);
                update_as(p.n, gradients, Alone{old, static_cast<float*>(p.after)}, state, k);
            } else if (working) {
                update_as(p.n, gradients, WithWorking{p.master, working}, state, k);
            } else {
                update_as(p.n, gradients, Alone{p.master, p.master}, state, k);
            }
        });
    }
}

extern "C" void square_sums(int64_t rows, int64_t length, const void* first, const void* second,
                            int bfloat16_gradients, float* sums) {
    with_gradients(first, second, bfloat16_gradients,
                   [&](auto gradients) { square_rows(rows, length, gradients, sums); });
}
