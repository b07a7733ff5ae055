// AdamW over flat host tensors, every byte read and written once. Python's side is one_pass.py.
//
// A loop a combination of types, which the compiler turns into vector code: plain C++, so that it compiles in a
// second or two. No element's result depends on the number of threads.

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
};

template <class Gradient, class Master>
void update(int64_t n, Gradient gradients, Master master, float* exp_avg, float* exp_avg_sq, Numbers k) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const float gradient = gradients(i) * k.scale;
        const float first = exp_avg[i] + (gradient - exp_avg[i]) * k.new1;
        const float second = exp_avg_sq[i] * k.old2 + gradient * gradient * k.new2;
        exp_avg[i] = first;
        exp_avg_sq[i] = second;
        const float before = master.read(i);
        master.write(i, before * k.keep - k.step_size * first / (std::sqrt(second) * k.correction2 + k.eps));
    }
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

// Null: `second`, a gradient with one use; `remainder`, masters are whole. `before` and `after` are working weights: of
// bfloat16, or, where there is no `master`, of float32, which are masters themselves. Null `after`: none are written.
extern "C" void adamw(int64_t n, const void* first, const void* second, int bfloat16_gradients, const void* before,
                      void* after, float* master, uint16_t* remainder, float* exp_avg, float* exp_avg_sq,
                      const float* numbers) {
    Numbers k;
    std::memcpy(&k, numbers, sizeof k);
    with_gradients(first, second, bfloat16_gradients, [&](auto gradients) {
        auto* working = static_cast<uint16_t*>(after);
        if (remainder) {
            const auto* old = static_cast<const uint16_t*>(before);
            update(n, gradients, Split{old, working, remainder}, exp_avg, exp_avg_sq, k);
        } else if (!master) {
            const auto* old = static_cast<const float*>(before);
            update(n, gradients, Alone{old, static_cast<float*>(after)}, exp_avg, exp_avg_sq, k);
        } else if (working) {
            update(n, gradients, WithWorking{master, working}, exp_avg, exp_avg_sq, k);
        } else {
            update(n, gradients, Alone{master, master}, exp_avg, exp_avg_sq, k);
        }
    });
}

extern "C" void square_sums(int64_t rows, int64_t length, const void* first, const void* second,
                            int bfloat16_gradients, float* sums) {
    with_gradients(first, second, bfloat16_gradients,
                   [&](auto gradients) { square_rows(rows, length, gradients, sums); });
}
