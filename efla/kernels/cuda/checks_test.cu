// The check of offsets and the order of sequences that it leaves. Needs a GPU (label gpu).

#include "efla/kernels/cuda/checks.h"

#include <algorithm>
#include <numeric>

#include "efla/kernels/cuda/delta_rule_test.h"

namespace efla::cuda {
namespace {

struct Result {
  std::vector<int64_t> checked, longest_first;
  bool found;
};

void check(const std::vector<int64_t>& offsets, int64_t tokens, Result& result) {
  Buffer<int64_t> in(offsets);
  Buffer<int64_t> checked(offsets.size()), order(offsets.size() - 1);
  CheckRecord* record = nullptr;
  CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&record), sizeof(CheckRecord),
                        cudaHostAllocMapped | cudaHostAllocPortable));
  *record = {};
  CUDA_OK(check_offsets(in.data(), true, 1, static_cast<int64_t>(offsets.size()), tokens, "test",
                        checked.data(), order.data(), record, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  result = {checked.host(), order.host(), record->found != 0};
  CUDA_OK(cudaFreeHost(record));
}

class Offsets : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(Offsets, LongestFirstAndEqualOnesAsTheyLie) {
  const std::vector<int64_t> offsets = {0, 0, 70, 70, 140, 290, 290};
  Result r;
  check(offsets, 300, r);
  EXPECT_FALSE(r.found);
  EXPECT_EQ(r.checked, offsets);
  EXPECT_EQ(r.longest_first, (std::vector<int64_t>{4, 1, 3, 0, 2, 5}));
}

TEST_F(Offsets, WrongOnesGiveEmptySequencesInOrder) {
  Result r;
  check({0, 4, 3, 20}, 30, r);
  EXPECT_TRUE(r.found);
  EXPECT_EQ(r.checked, std::vector<int64_t>(4, 0));
  EXPECT_EQ(r.longest_first, (std::vector<int64_t>{0, 1, 2}));
}

TEST_F(Offsets, ManyAreSortedAndMoreAreNot) {
  for (const int64_t count : {kSortedSequences, kSortedSequences + 1}) {
    std::vector<int64_t> offsets(count + 1), expected(count);
    for (int64_t i = 0; i <= count; ++i) offsets[i] = i * i;  // each longer than the one before
    std::iota(expected.begin(), expected.end(), 0);
    if (count == kSortedSequences) std::reverse(expected.begin(), expected.end());
    Result r;
    check(offsets, offsets.back(), r);
    EXPECT_EQ(r.longest_first, expected);
  }
}

}  // namespace
}  // namespace efla::cuda
