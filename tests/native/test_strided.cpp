// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Strided and converted sources against the plain loop, in memory of exactly their size.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "convert.h"
#include "strided.h"
#include "team.h"

namespace pinstage {
namespace {

using check::run_together;
using Rng = std::mt19937_64;

std::int64_t pick(Rng& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

// A view of some memory, and the shape that it is broadcast to.
struct View {
  std::vector<char> memory;
  std::size_t itemsize = 1;
  std::vector<std::int64_t> shape, strides, target;

  bool plan(Strided* out) const {
    return plan_strided(memory.data(), static_cast<int>(shape.size()), shape.data(), strides.data(), itemsize,
                        static_cast<int>(target.size()), target.data(), out);
  }

  std::vector<char> expected() const {
    std::vector<char> out;
    std::vector<std::int64_t> at(target.size(), 0);
    const std::size_t missing = target.size() - shape.size();
    for (;;) {
      std::int64_t offset = 0;
      for (std::size_t i = 0; i < shape.size(); ++i) offset += (shape[i] == 1 ? 0 : at[i + missing]) * strides[i];
      const char* item = memory.data() + offset * static_cast<std::int64_t>(itemsize);
      out.insert(out.end(), item, item + itemsize);
      std::size_t i = target.size();
      while (i > 0 && ++at[i - 1] == target[i - 1]) at[--i] = 0;
      if (i == 0) return out;
    }
  }
};

View random_view(Rng& rng) {
  View view;
  view.itemsize = std::size_t{1} << pick(rng, 0, 4);
  const std::int64_t ndim = pick(rng, 0, 4), longest = pick(rng, 2, 20);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(ndim));
  for (std::int64_t& size : sizes) size = pick(rng, 0, 3) == 0 ? 1 : pick(rng, 1, longest);
  // Dense in a random order of the dimensions, with room between the elements of some.
  std::vector<std::size_t> order(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (pick(rng, 0, 1) == 0) std::shuffle(order.begin(), order.end(), rng);
  view.shape = sizes;
  view.strides.assign(sizes.size(), 0);
  std::int64_t stride = pick(rng, 0, 2) == 0 ? pick(rng, 2, 3) : 1, last = 0;
  for (std::size_t i = order.size(); i-- > 0;) {
    view.strides[order[i]] = stride;
    last += (sizes[order[i]] - 1) * stride;
    stride *= sizes[order[i]];
    if (pick(rng, 0, 2) == 0) stride += pick(rng, 1, 5);
  }
  view.target = sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (view.shape[i] == 1 && pick(rng, 0, 1) == 0) view.target[i] = pick(rng, 1, 6);
  }
  if (sizes.size() < 3 && pick(rng, 0, 1) == 0) view.target.insert(view.target.begin(), pick(rng, 1, 4));
  view.memory.resize(static_cast<std::size_t>(last + 1) * view.itemsize);
  for (char& byte : view.memory) byte = static_cast<char>(rng());
  return view;
}

TEST("every strided and broadcast source is copied element by element, whole and in parts") {
  Rng rng(1);
  int cases = 0;
  for (int i = 0; i < 3000; ++i) {
    const View view = random_view(rng);
    Strided source;
    CHECK(view.plan(&source));
    const std::vector<char> expected = view.expected();
    CHECK_EQ(static_cast<std::size_t>(source.rows * source.row_bytes), expected.size());
    std::vector<char> out(expected.size());
    copy_strided(out.data(), source, 0, source.rows);
    CHECK(out == expected);
    std::fill(out.begin(), out.end(), char{0});
    const std::int64_t cut = pick(rng, 0, source.rows);
    copy_strided(out.data() + cut * source.row_bytes, source, cut, source.rows);
    copy_strided(out.data(), source, 0, cut);
    CHECK(out == expected);
    cases += source.ndim > 1;
  }
  CHECK(cases > 500);
}

TEST("what lies densely is one row, in however many dimensions") {
  View view;
  view.memory.resize(4 * 3 * 5 * 8);
  view.itemsize = 8;
  view.shape = view.target = {4, 1, 3, 5};
  view.strides = {15, 99, 5, 1};
  Strided source;
  CHECK(view.plan(&source));
  CHECK_EQ(source.ndim, 0);
  CHECK_EQ(source.row_bytes, 4 * 3 * 5 * 8);
}

TEST("a plane of a table is rows at one stride") {
  View view;
  view.memory.resize(6 * 2 * 16 * 4);
  view.itemsize = 4;
  view.shape = view.target = {2, 3, 16};  // [P, C, 2, W][:, :, 0]
  view.strides = {96, 32, 1};
  Strided source;
  CHECK(view.plan(&source));
  CHECK_EQ(source.ndim, 1);
  CHECK_EQ(source.size[0], 6);
  CHECK_EQ(source.stride[0], 128);
  CHECK_EQ(source.row_bytes, 64);
}

TEST("what does not broadcast has no plan") {
  View view;
  view.memory.resize(64);
  view.shape = {3, 4};
  view.strides = {4, 1};
  Strided source;
  for (const std::vector<std::int64_t>& target : {std::vector<std::int64_t>{4}, {3, 5}, {4, 3}, {2, 4}}) {
    view.target = target;
    CHECK(!view.plan(&source));
  }
}

TEST("several callers copy large strided sources on the team at once") {
  View view;
  view.itemsize = 4;
  view.shape = view.target = {3, 300, 1000};
  view.strides = {700000, 2300, 1};
  view.memory.resize((2 * 700000 + 299 * 2300 + 1000) * 4);
  Rng rng(2);
  for (std::size_t i = 0; i < view.memory.size(); i += 7) view.memory[i] = static_cast<char>(rng());
  Strided source;
  CHECK(view.plan(&source));
  const std::vector<char> expected = view.expected();
  Team::instance().set_threads(3);
  run_together(2, [&](int) {
    std::vector<char> out(expected.size());
    for (int round = 0; round < 3; ++round) {
      std::fill(out.begin(), out.end(), char{0});
      copy_strided_in_parallel(out.data(), source, 0, source.rows);
      CHECK(out == expected);
    }
  });
  Team::instance().set_threads(0);
}

template <class From, class To>
void check_conversion() {
  Rng rng(3);
  const DlDataType from{kDlInt, sizeof(From) * 8, 1}, to{kDlInt, sizeof(To) * 8, 1};
  const Conversion convert = conversion(from, to);
  CHECK(convert != nullptr);
  for (std::size_t count = 0; count < 80; ++count) {
    for (std::size_t odd : {std::size_t{0}, std::size_t{1}}) {
      std::vector<From> values(count);
      for (From& value : values) value = static_cast<From>(rng());
      if (count > 1) {
        values.front() = std::numeric_limits<From>::min();
        values.back() = std::numeric_limits<From>::max();
      }
      std::vector<char> src(count * sizeof(From) + odd), dst(count * sizeof(To) + odd);
      if (count > 0) std::memcpy(src.data() + odd, values.data(), count * sizeof(From));
      convert(dst.data() + odd, src.data() + odd, static_cast<std::int64_t>(count));
      for (std::size_t i = 0; i < count; ++i) {
        To got;
        std::memcpy(&got, dst.data() + odd + i * sizeof(To), sizeof(To));
        CHECK_EQ(got, static_cast<To>(values[i]));
      }
    }
  }
}

TEST("integers are widened and narrowed at any length and alignment") {
  check_conversion<std::int32_t, std::int64_t>();
  check_conversion<std::int64_t, std::int32_t>();
}

TEST("other conversions are torch's") {
  const DlDataType int32{kDlInt, 32, 1}, uint64{kDlUInt, 64, 1}, complex32{kDlComplex, 32, 1}, int16{kDlInt, 16, 1};
  CHECK(conversion(int32, uint64) == nullptr);
  CHECK(conversion(complex32, int32) == nullptr);
  CHECK(conversion(int16, int32) == nullptr);
  CHECK(conversion(int32, int32) == nullptr);
}

}  // namespace
}  // namespace pinstage
