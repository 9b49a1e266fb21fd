// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Where the pieces of a scattered slot lie, how they are cut for the kernel, and how the simulated driver runs it.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "scatter.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

// The descriptors, from a slot of exactly the bytes that the layout asks for.
std::vector<ScatterPiece> pieces_of(const Scatter& layout, std::size_t count) {
  std::vector<char> slot(layout.slot_bytes());
  layout.write_pieces(slot.data());
  std::vector<ScatterPiece> pieces(count);
  std::memcpy(pieces.data(), slot.data() + slot.size() - count * sizeof(ScatterPiece), count * sizeof(ScatterPiece));
  return pieces;
}

std::size_t pieces_in(const Scatter& layout, std::size_t end) {
  return (layout.slot_bytes() - (end + 63) / 64 * 64) / sizeof(ScatterPiece);
}

TEST("bytes lie in the slot as they will on the device, modulo a vector") {
  Scatter layout;
  CHECK_EQ(layout.add(0x1000, 10), 0);
  CHECK_EQ(layout.add(0x2005, 10), 64 + 5);
  CHECK_EQ(layout.place(3), 128);
  CHECK_EQ(layout.add(0x300f, 50), 192 + 15);
  CHECK_EQ(layout.add(0x4000, 1), 320);
  CHECK_EQ(layout.slot_bytes(), 384 + 4 * 16);
}

TEST("a slot without pieces has no descriptors") {
  Scatter layout;
  CHECK_EQ(layout.slot_bytes(), 0);
  CHECK_EQ(layout.place(100), 0);
  CHECK_EQ(layout.place(100), 128);
  CHECK_EQ(layout.slot_bytes(), 256);
  CHECK_EQ(pieces_in(layout, 228), 0);
}

TEST("pieces cover their bytes once, in order, and none is more than a block takes") {
  for (DevicePtr from_vector = 0; from_vector < 16; ++from_vector) {
    for (const std::size_t nbytes :
         {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{17}, std::size_t{8176}, std::size_t{8177},
          std::size_t{8191}, std::size_t{8192}, std::size_t{8193}, std::size_t{16384}, std::size_t{100000}}) {
      Scatter layout;
      const DevicePtr dst = 0x7000000 + from_vector;
      const std::size_t offset = layout.add(dst, nbytes);
      CHECK_EQ(offset, from_vector);
      CHECK(layout.slot_bytes() <= Scatter::most_bytes(nbytes));
      const std::size_t count = pieces_in(layout, offset + nbytes);
      CHECK_EQ(count, (from_vector + nbytes + kScatterPieceBytes - 1) / kScatterPieceBytes);
      std::size_t done = 0;
      for (const ScatterPiece& piece : pieces_of(layout, count)) {
        CHECK_EQ(piece.dst, dst + done);
        CHECK_EQ(piece.offset, offset + done);
        CHECK(piece.nbytes > 0);
        CHECK(piece.dst % kScatterVector + piece.nbytes <= kScatterPieceBytes);
        done += piece.nbytes;
      }
      CHECK_EQ(done, nbytes);
    }
  }
}

TEST("an offset of 48 bits is whole in its descriptor") {
  Scatter layout;
  layout.place(std::size_t{1} << 40);
  CHECK_EQ(layout.add(0x1003, 5), (std::size_t{1} << 40) + 3);
  ScatterPiece piece{};
  piece.nbytes = 5;
  piece.offset = (std::uint64_t{1} << 40) + 3;
  std::uint64_t words[2];
  std::memcpy(words, &piece, sizeof(piece));
  CHECK_EQ(words[1], (((std::uint64_t{1} << 40) + 3) << 16) + 5);  // as the kernel takes it apart
}

// --- the simulated driver ---

struct Kernel {
  explicit Kernel(Sim& s) : sim(s) {
    Module module = nullptr;
    CHECK_EQ(sim.driver.module_load_data(&module, kScatterPtx), status::kSuccess);
    CHECK_EQ(sim.driver.module_get_function(&function, module, kScatterName), status::kSuccess);
  }
  Status launch(const char* slot, const char* pieces, unsigned count, Stream stream, unsigned threads = kScatterThreads,
                Function which = nullptr) {
    DevicePtr arguments[] = {Sim::address(slot), Sim::address(pieces), first, end};
    void* parameters[] = {&arguments[0], &arguments[1], &arguments[2], &arguments[3]};
    return sim.driver.launch_kernel(which != nullptr ? which : function, count, 1, 1, threads, 1, 1, 0, stream,
                                    parameters, nullptr);
  }

  Sim& sim;
  Function function = nullptr;
  DevicePtr first = 0, end = ~DevicePtr{0};
};

// "abcd" for one address and "xyz" for another, with room for their descriptors behind.
struct TwoPieces {
  TwoPieces(Sim& sim, char* first, char* second) {
    layout.add(Sim::address(first), 4);
    const std::size_t other = layout.add(Sim::address(second), 3);
    slot = sim.host(layout.slot_bytes());
    std::memcpy(slot + Sim::address(first) % 16, "abcd", 4);
    std::memcpy(slot + other, "xyz", 3);
    layout.write_pieces(slot);
    pieces = slot + layout.slot_bytes() - 2 * sizeof(ScatterPiece);
  }
  Scatter layout;
  char* slot;
  char* pieces;
};

TEST("the simulated kernel reads descriptors and bytes when it runs, in the order of its stream") {
  Sim sim(Schedule::kLate);
  Kernel kernel(sim);
  const Stream stream = sim.stream();
  char *const one = sim.heap(8), *const two = sim.heap(8), *const three = sim.heap(8);
  TwoPieces work(sim, one, two + 1);
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, stream), status::kSuccess);
  CHECK_EQ(bytes(one, 4), poison(4));
  work.slot[1] = 'B';
  DevicePtr elsewhere = Sim::address(three + 1);
  std::memcpy(work.pieces + sizeof(ScatterPiece), &elsewhere, sizeof(elsewhere));
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(one, 4), "aBcd");
  CHECK_EQ(bytes(two, 8), poison(8));
  CHECK_EQ(bytes(three + 1, 3), "xyz");
  CHECK_EQ(sim.device.violations(), 0);
}

TEST("the simulated kernel keeps what it writes alive, and a slot that is gone is counted and reads as poison") {
  Sim sim(Schedule::kLate);
  Kernel kernel(sim);
  char *const one = sim.heap(8), *const two = sim.heap(8);
  TwoPieces work(sim, one, two);
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, nullptr), status::kSuccess);
  SimulatedDevice::heap_free(one);
  CHECK_EQ(sim.driver.mem_free_host(work.slot), status::kSuccess);
  CHECK_EQ(sim.device.violations(), 2);
  CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
  CHECK_EQ(bytes(two, 3), poison(3));
}

TEST("a descriptor that is none of the launch's writes nothing") {
  for (const int fault : {0, 1, 2, 3, 4}) {
    Sim sim(Schedule::kLate);
    Kernel kernel(sim);
    char* const one = sim.heap(64);
    TwoPieces work(sim, one, one + 32);
    kernel.first = Sim::address(one);
    kernel.end = Sim::address(one + 35);
    ScatterPiece piece{};
    std::memcpy(&piece, work.pieces, sizeof(piece));
    if (fault == 0) piece.dst -= 16;                           // below the lowest
    if (fault == 1) piece.dst += 32;                           // reaches over the end of the highest
    if (fault == 2) piece.offset += 1;                         // lies otherwise than its bytes
    if (fault == 3) piece.offset += 1 << 20;                   // beyond the bytes of the slot
    if (fault == 4) std::memset(&piece, 0xff, sizeof(piece));  // anything at all
    std::memcpy(work.pieces, &piece, sizeof(piece));
    CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, nullptr), status::kSuccess);
    CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
    CHECK_EQ(bytes(one, 32), poison(32));
    CHECK_EQ(bytes(one + 32, 3), "xyz");
  }
}

TEST("a piece that is out of bounds loses the device when the kernel runs") {
  Sim sim(Schedule::kLate);
  Kernel kernel(sim);
  char* const one = sim.heap(8);
  TwoPieces work(sim, one, sim.heap(8));
  const DevicePtr behind = Sim::address(one) + 16;
  std::memcpy(work.pieces, &behind, sizeof(behind));
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, nullptr), status::kSuccess);
  CHECK_EQ(sim.driver.ctx_synchronize(), 700);
  CHECK_EQ(bytes(one, 8), poison(8));
}

TEST("an unknown kernel, another launch shape, and another module are refused") {
  Sim sim(Schedule::kLate);
  Kernel kernel(sim);
  TwoPieces work(sim, sim.heap(8), sim.heap(8));
  int other = 0;
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, nullptr, kScatterThreads, &other), status::kInvalidValue);
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, nullptr, 2 * kScatterThreads), status::kInvalidValue);
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 0, nullptr), status::kInvalidValue);
  Module module = nullptr;
  Function function = nullptr;
  CHECK_EQ(sim.driver.module_load_data(&module, ".version 5.0"), status::kInvalidPtx);
  CHECK_EQ(sim.driver.module_load_data(&module, nullptr), status::kInvalidValue);
  CHECK_EQ(sim.driver.module_load_data(&module, kScatterPtx), status::kSuccess);
  CHECK_EQ(sim.driver.module_get_function(&function, module, "another"), status::kNotFound);
  CHECK_EQ(sim.driver.module_get_function(&function, &other, kScatterName), status::kInvalidHandle);
  CHECK_EQ(sim.device.pending(), 0);
}

TEST("a kernel is captured, and a replay reads the slot again") {
  Sim sim(Schedule::kLate);
  Kernel kernel(sim);
  const Stream stream = sim.stream();
  char *const one = sim.heap(8), *const two = sim.heap(8);
  TwoPieces work(sim, one, two);
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  CHECK_EQ(kernel.launch(work.slot, work.pieces, 2, stream), status::kSuccess);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);
  CHECK_EQ(bytes(one, 4), poison(4));
  for (const char letter : {'A', 'B'}) {
    work.slot[0] = letter;
    CHECK_EQ(sim.device.replay(graph, stream), status::kSuccess);
    CHECK_EQ(sim.driver.ctx_synchronize(), status::kSuccess);
    CHECK_EQ(bytes(one, 4), letter + std::string("bcd"));
  }
}

TEST("a kernel may not be loaded inside a capture that forbids it, and a device opened there loads it all the same") {
  Sim sim(Schedule::kLate);
  const Stream stream = sim.stream();
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  const auto device =
      std::make_shared<Device>(sim.driver, sim.device.context(), DeviceKind::kSimulated, 0, nullptr, nullptr);
  CHECK(device->scatter_kernel() != nullptr);
  SimulatedGraph graph;
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kSuccess);  // the capture survived
  CHECK_EQ(sim.device.begin_capture(stream, kCaptureModeGlobal), status::kSuccess);
  Module module = nullptr;
  CHECK_EQ(sim.driver.module_load_data(&module, kScatterPtx), status::kStreamCaptureUnsupported);
  CHECK_EQ(sim.device.end_capture(stream, &graph), status::kStreamCaptureInvalidated);
}

}  // namespace
