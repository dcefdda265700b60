#include "efla/eval/python_random.h"

#include <bit>
#include <numeric>
#include <unordered_set>

namespace efla {

// init_by_array() of the reference mt19937ar.c, with the seed's 32-bit words as the key.
PythonRandom::PythonRandom(uint64_t seed) {
  std::vector<uint32_t> key = {static_cast<uint32_t>(seed)};
  if (seed >> 32 != 0) key.push_back(static_cast<uint32_t>(seed >> 32));
  state_[0] = 19650218;
  for (uint32_t i = 1; i < kSize; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
  size_t i = 1;
  const auto previous = [&] { return state_[i - 1] ^ (state_[i - 1] >> 30); };
  const auto advance = [&] {
    if (++i < kSize) return;
    state_[0] = state_[kSize - 1];
    i = 1;
  };
  for (size_t round = 0; round < kSize; ++round) {
    const size_t j = round % key.size();
    state_[i] = (state_[i] ^ (previous() * 1664525u)) + key[j] + static_cast<uint32_t>(j);
    advance();
  }
  for (size_t round = 0; round < kSize - 1; ++round) {
    state_[i] = (state_[i] ^ (previous() * 1566083941u)) - static_cast<uint32_t>(i);
    advance();
  }
  state_[0] = 0x80000000u;
}

void PythonRandom::refill() {
  constexpr size_t kShift = 397;
  for (size_t i = 0; i < kSize; ++i) {
    const uint32_t y =
        (state_[i] & 0x80000000u) | (state_[i + 1 == kSize ? 0 : i + 1] & 0x7fffffffu);
    const size_t far = i + kShift < kSize ? i + kShift : i + kShift - kSize;
    state_[i] = state_[far] ^ (y >> 1) ^ ((y & 1) != 0 ? 0x9908b0dfu : 0u);
  }
  used_ = 0;
}

uint32_t PythonRandom::next() {
  if (used_ == kSize) refill();
  uint32_t y = state_[used_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

double PythonRandom::uniform() {
  const uint32_t high = next() >> 5, low = next() >> 6;
  return (high * 67108864.0 + low) / 9007199254740992.0;
}

uint32_t PythonRandom::below(uint32_t bound) {
  const int bits = std::bit_width(bound);
  uint32_t drawn;
  do {
    drawn = static_cast<uint32_t>(uint64_t{next()} >> (32 - bits));
  } while (drawn >= bound);
  return drawn;
}

std::vector<int64_t> PythonRandom::sample(int64_t size, int64_t k) {
  std::vector<int64_t> drawn;
  // Python copies a population that is small beside a set of k, else it draws again what it had.
  int64_t set_size = 21;
  if (k > 5) {
    int64_t power = 1;
    while (power < 3 * k) power *= 4;
    set_size += power;
  }
  if (size <= set_size) {
    std::vector<int64_t> pool(static_cast<size_t>(size));
    std::iota(pool.begin(), pool.end(), 0);
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t j = below(static_cast<uint32_t>(size - i));
      drawn.push_back(pool[j]);
      pool[j] = pool[static_cast<size_t>(size - i - 1)];
    }
    return drawn;
  }
  std::unordered_set<uint32_t> selected;
  while (static_cast<int64_t>(drawn.size()) < k) {
    const uint32_t j = below(static_cast<uint32_t>(size));
    if (selected.insert(j).second) drawn.push_back(j);
  }
  return drawn;
}

}  // namespace efla
