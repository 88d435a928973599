// FlashAttention's forward pass by hand: y_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s, every position seeing all.
//
// A block of four or eight warps takes 128 queries of one head and goes over the keys 64 at a time. A warp holds 16 or
// 32 of the queries, their scores against a tile of keys, and their output so far, all in registers; only tiles of keys
// and values are in shared memory. Of each query it keeps the largest score so far and the sum of exponentials under it.
//
// What it takes to feed a tensor core comes in steps, each a kernel of its own, so that each can be timed:
//
//   1  products by mma.m16n8k16; its right-hand sides are read from shared memory by plain loads, values half by half
//   2  they are read by ldmatrix, four 8 x 8 matrices with one instruction, values transposed on the way
//   3  tiles come by cp.async: no registers in between, and values arrive while the scores are computed
//   4  two stages: the next tile of keys and values is on its way while this one is computed with
#include "primitives.cuh"

constexpr int KEYS = 64;
constexpr int QUERIES = 128;
constexpr float LOG2_E = 1.4426950408889634f;

template <int WIDTH>
struct Shape {
    // Two slabs of 16 queries a warp use what is read from shared memory twice; at 128 channels their output would take
    // more registers than there are.
    static constexpr int SLABS = WIDTH == 64 ? 2 : 1;
    static constexpr int THREADS = QUERIES / (16 * SLABS) * 32;
    static constexpr int TILE = KEYS * WIDTH;
};

// Where a tile has row and channel. The 16-byte pieces of a row are permuted by its number: eight rows of one column of
// pieces, which ldmatrix reads together, then lie in different banks.
template <int WIDTH>
__device__ inline int place(int row, int channel) {
    int piece = channel / 8 ^ row % 8;
    return row * WIDTH + piece * 8 + channel % 8;
}

// A tile of keys or values into shared memory, zeros past the last position.
template <int WIDTH, bool ASYNC, typename Half>
__device__ inline void fetch(Half* tile, const Half* source, int first, int length) {
    constexpr int PIECES = WIDTH / 8;
#pragma unroll
    for (int turn = 0; turn < KEYS * PIECES / Shape<WIDTH>::THREADS; ++turn) {
        int index = turn * Shape<WIDTH>::THREADS + threadIdx.x;
        int row = index / PIECES, channel = index % PIECES * 8;
        bool inside = first + row < length;
        // Where it is outside nothing is read, but the address should still be one.
        const Half* from = source + static_cast<int64_t>(inside ? first + row : 0) * WIDTH + channel;
        Half* to = tile + place<WIDTH>(row, channel);
        if constexpr (ASYNC) {
            copy_async(to, from, inside);
        } else {
            *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        }
    }
}

// The 16 queries from `first` on as left matrices, one for each 16 channels, straight from global memory.
template <int WIDTH, typename Half>
__device__ inline void load_queries(uint32_t (&query)[WIDTH / 16][4], const Half* source, int first, int length) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < WIDTH / 16; ++part) {
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            int row = first + lane / 4 + index % 2 * 8, channel = part * 16 + lane % 4 * 2 + index / 2 * 8;
            const Half* from = source + static_cast<int64_t>(row) * WIDTH + channel;
            query[part][index] = row < length ? *reinterpret_cast<const uint32_t*>(from) : 0;
        }
    }
}

// Of keys `key` ... `key` + 15 and 16 channels, as right matrices: channels go down and keys across. Registers 0 and 1
// are of the first eight keys, 2 and 3 of the others.
template <int WIDTH, int STEP, typename Half>
__device__ inline void load_keys(uint32_t (&right)[4], const Half* tile, int key, int channel) {
    int lane = threadIdx.x % 32;
    if constexpr (STEP >= 2) {
        int matrix = lane / 8;
        load_matrices(right, tile + place<WIDTH>(key + matrix / 2 * 8 + lane % 8, channel + matrix % 2 * 8));
    } else {
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            int own = place<WIDTH>(key + index / 2 * 8 + lane / 4, channel + index % 2 * 8 + lane % 4 * 2);
            right[index] = *reinterpret_cast<const uint32_t*>(tile + own);
        }
    }
}

// Of the values of 16 keys and channels `channel` ... `channel` + 15, as right matrices: keys go down and channels
// across, as they do in memory, so that the two halves of a register are not side by side there.
template <int WIDTH, int STEP, typename Half>
__device__ inline void load_values(uint32_t (&right)[4], const Half* tile, int key, int channel) {
    int lane = threadIdx.x % 32;
    if constexpr (STEP >= 2) {
        int matrix = lane / 8;
        load_matrices_transposed(right,
                                 tile + place<WIDTH>(key + matrix % 2 * 8 + lane % 8, channel + matrix / 2 * 8));
    } else {
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(tile);
#pragma unroll
        for (int index = 0; index < 4; ++index) {
            int row = key + index % 2 * 8 + lane % 4 * 2, column = channel + index / 2 * 8 + lane / 4;
            uint32_t lower = bits[place<WIDTH>(row, column)], upper = bits[place<WIDTH>(row + 1, column)];
            right[index] = lower | upper << 16;
        }
    }
}

// What a warp knows of 16 queries; a thread has rows lane / 4 and lane / 4 + 8.
template <int WIDTH>
struct Rows {
    float output[WIDTH / 8][4] = {};
    float largest[2] = {-INFINITY, -INFINITY};
    float total[2] = {};
};

// Turns the scores of a tile into weights under a new largest score, and brings what there is under it too.
template <int WIDTH>
__device__ inline void weigh(Rows<WIDTH>& rows, float (&score)[KEYS / 8][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = rows.largest[half];
#pragma unroll
        for (int part = 0; part < KEYS / 8; ++part) {
            largest = fmaxf(largest, fmaxf(score[part][2 * half], score[part][2 * half + 1]));
        }
        // A row lies in four neighbouring threads.
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
        float correction = power_of_two((rows.largest[half] - largest) * scale);
        float total = 0;
#pragma unroll
        for (int part = 0; part < KEYS / 8; ++part) {
#pragma unroll
            for (int index = 2 * half; index < 2 * half + 2; ++index) {
                score[part][index] = power_of_two(score[part][index] * scale - largest * scale);
                total += score[part][index];
            }
        }
        rows.largest[half] = largest;
        // Of this thread's columns alone: the four are added up once, at the end.
        rows.total[half] = rows.total[half] * correction + total;
#pragma unroll
        for (int part = 0; part < WIDTH / 8; ++part) {
            rows.output[part][2 * half] *= correction;
            rows.output[part][2 * half + 1] *= correction;
        }
    }
}

template <int WIDTH, typename Half>
__device__ inline void store(Half* target, Rows<WIDTH>& rows, int first, int length) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = rows.total[half];
        total += __shfl_xor_sync(0xffffffff, total, 1);
        total += __shfl_xor_sync(0xffffffff, total, 2);
        int row = first + lane / 4 + half * 8;
        if (row >= length) continue;
#pragma unroll
        for (int part = 0; part < WIDTH / 8; ++part) {
            uint32_t both = pack(rows.output[part][2 * half] / total, rows.output[part][2 * half + 1] / total, Half());
            Half* to = target + static_cast<int64_t>(row) * WIDTH + part * 8 + lane % 4 * 2;
            *reinterpret_cast<uint32_t*>(to) = both;
        }
    }
}

// Query, key, value and output are (heads, length, WIDTH), each contiguous.
template <int WIDTH, int STEP, typename Half>
__global__ void __launch_bounds__(Shape<WIDTH>::THREADS)
    attend(const Half* query, const Half* key, const Half* value, Half* output, int length, float scale) {
    constexpr int SLABS = Shape<WIDTH>::SLABS, TILE = Shape<WIDTH>::TILE;
    constexpr bool ASYNC = STEP >= 3, TWO_STAGES = STEP >= 4;
    Half* tiles = reinterpret_cast<Half*>(shared_memory());
    int64_t offset = static_cast<int64_t>(blockIdx.y) * length * WIDTH;
    key += offset, value += offset;
    int first_query = blockIdx.x * QUERIES + threadIdx.x / 32 * 16 * SLABS;
    uint32_t left[SLABS][WIDTH / 16][4];
    Rows<WIDTH> rows[SLABS];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        load_queries<WIDTH>(left[slab], query + offset, first_query + slab * 16, length);
    }
    if constexpr (TWO_STAGES) {
        fetch<WIDTH, ASYNC>(tiles, key, 0, length);
        fetch<WIDTH, ASYNC>(tiles + TILE, value, 0, length);
        commit_copies();
    }
    for (int first = 0, stage = 0; first < length; first += KEYS, stage ^= TWO_STAGES) {
        Half *keys = tiles + stage * 2 * TILE, *values = keys + TILE;
        if constexpr (TWO_STAGES) {
            Half* next = tiles + (stage ^ 1) * 2 * TILE;
            if (first + KEYS < length) {
                fetch<WIDTH, ASYNC>(next, key, first + KEYS, length);
                fetch<WIDTH, ASYNC>(next + TILE, value, first + KEYS, length);
            }
            // Also where it is empty: the group before it is then always the last but one.
            commit_copies();
            wait_for_copies<1>();
        } else {
            fetch<WIDTH, ASYNC>(keys, key, first, length);
            if constexpr (ASYNC) commit_copies();
            fetch<WIDTH, ASYNC>(values, value, first, length);
            if constexpr (ASYNC) {
                commit_copies();
                wait_for_copies<1>();
            }
        }
        __syncthreads();

        float score[SLABS][KEYS / 8][4] = {};
#pragma unroll
        for (int part = 0; part < WIDTH / 16; ++part) {
#pragma unroll
            for (int group = 0; group < KEYS / 16; ++group) {
                uint32_t right[4];
                load_keys<WIDTH, STEP>(right, keys, group * 16, part * 16);
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    multiply(score[slab][2 * group], left[slab][part], right[0], right[1], Half());
                    multiply(score[slab][2 * group + 1], left[slab][part], right[2], right[3], Half());
                }
            }
        }
        if (first + KEYS > length) {
#pragma unroll
            for (int column = 0; column < KEYS / 8 * 2; ++column) {
                if (first + column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2 < length) continue;
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    score[slab][column / 2][column % 2] = score[slab][column / 2][column % 2 + 2] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) weigh(rows[slab], score[slab], scale);

        if constexpr (ASYNC && !TWO_STAGES) {
            wait_for_copies<0>();
            __syncthreads();
        }
#pragma unroll
        for (int group = 0; group < KEYS / 16; ++group) {
            uint32_t weight[SLABS][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
                for (int index = 0; index < 4; ++index) {
                    const float* pair = &score[slab][2 * group + index / 2][index % 2 * 2];
                    weight[slab][index] = pack(pair[0], pair[1], Half());
                }
            }
#pragma unroll
            for (int part = 0; part < WIDTH / 16; ++part) {
                uint32_t right[4];
                load_values<WIDTH, STEP>(right, values, group * 16, part * 16);
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    multiply(rows[slab].output[2 * part], weight[slab], right[0], right[1], Half());
                    multiply(rows[slab].output[2 * part + 1], weight[slab], right[2], right[3], Half());
                }
            }
        }
        // Before the next tile is written over this one.
        __syncthreads();
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        store<WIDTH>(output + offset, rows[slab], first_query + slab * 16, length);
    }
}

template <int WIDTH, int STEP, typename Half>
cudaError_t launch(const void* query, const void* key, const void* value, void* output, int num_heads, int length,
                   cudaStream_t stream) {
    constexpr int NUM_BYTES = (STEP >= 4 ? 4 : 2) * Shape<WIDTH>::TILE * sizeof(Half);
    auto kernel = attend<WIDTH, STEP, Half>;
    // More than 48 KiB of shared memory must be asked for.
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, NUM_BYTES);
    if (error != cudaSuccess) return error;
    dim3 grid((length + QUERIES - 1) / QUERIES, num_heads);
    kernel<<<grid, Shape<WIDTH>::THREADS, NUM_BYTES, stream>>>(
        static_cast<const Half*>(query), static_cast<const Half*>(key), static_cast<const Half*>(value),
        static_cast<Half*>(output), length, LOG2_E / sqrtf(WIDTH));
    return cudaGetLastError();
}

template <int WIDTH, typename Half>
cudaError_t launch_step(int step, const void* query, const void* key, const void* value, void* output, int num_heads,
                        int length, cudaStream_t stream) {
    switch (step) {
        case 1: return launch<WIDTH, 1, Half>(query, key, value, output, num_heads, length, stream);
        case 2: return launch<WIDTH, 2, Half>(query, key, value, output, num_heads, length, stream);
        case 3: return launch<WIDTH, 3, Half>(query, key, value, output, num_heads, length, stream);
        case 4: return launch<WIDTH, 4, Half>(query, key, value, output, num_heads, length, stream);
        default: return cudaErrorInvalidValue;
    }
}

// For a caller without this compiler's types. Returns what went wrong, or null.
extern "C" const char* attnbench_flash_attention(int step, const void* query, const void* key, const void* value,
                                                 void* output, int num_heads, int length, int width, int is_bfloat16,
                                                 void* stream) {
    auto at = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaErrorInvalidValue;
    if (width == 64) {
        auto run = is_bfloat16 ? launch_step<64, __nv_bfloat16> : launch_step<64, __half>;
        error = run(step, query, key, value, output, num_heads, length, at);
    } else if (width == 128) {
        auto run = is_bfloat16 ? launch_step<128, __nv_bfloat16> : launch_step<128, __half>;
        error = run(step, query, key, value, output, num_heads, length, at);
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
