// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Every order in which a device may complete what a program enqueued, as far as the core can tell.
//
// The core learns of the device by cuEventQuery alone. So the query of an event that has not happened is a point of
// choice: "not ready", or "done", and then the device runs what that event needs and nothing else: each copy reads its
// source at the last moment that the answers so far allow. In a wait, idle() chooses whose next fence comes. The tree
// of these choices is walked to its last leaf. Two orders of completion with the same answers are one to the core, and
// what a device runs earlier than here reads a source no later: no other order can show more.
//
// The programs are generated: up to 8 operations on up to 3 streams, in a pool of 4 slots. After every operation and at
// every slot that is handed out the invariants of the pool are checked, at the end every byte.
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "pool.h"
#include "simulated_fixture.h"

namespace {

using namespace pinstage;
using namespace pinstage::check;

constexpr std::size_t kGranule = Offsets::kGranule, kCapacity = 4 * kGranule;
constexpr int kStreams = 3, kMostOperations = 8;

// --- the tree of choices ---

// A path through the tree: replayed up to the last choice that was changed, then the first option of each new one.
class Choices {
 public:
  std::size_t choose(std::size_t options) {
    if (at_ == path_.size()) path_.push_back({0, options});
    if (path_[at_].options != options) throw std::logic_error("the program is not deterministic");
    return path_[at_++].taken;
  }
  // Goes on to the next leaf; false after the last.
  bool next() {
    at_ = 0;
    while (!path_.empty() && path_.back().taken + 1 == path_.back().options) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().taken;
    return true;
  }
  std::string text() const {
    std::string text;
    for (const Choice& choice : path_) text += static_cast<char>('0' + choice.taken);
    return text;
  }

 private:
  struct Choice {
    std::size_t taken, options;
  };
  std::vector<Choice> path_;
  std::size_t at_ = 0;
};

enum class Answers { kChosen, kTrue, kLies };

// What stands between the core and the simulated driver. Global, because the table's functions have no context.
struct World {
  Driver driver;  // of the simulation
  Answers answers = Answers::kTrue;
  bool calls_forbidden = false;
  bool called_while_forbidden = false;
  Choices choices;
  std::vector<Event> events;  // made so far; the first `used` of them in this run
  std::size_t used = 0;
  std::vector<std::pair<Stream, Event>> records;  // of this run, in order
  int idles = 0;

  bool happened(Event event) const { return driver.event_query(event) == status::kSuccess; }
};
World* world;

void count_call() { world->called_while_forbidden |= world->calls_forbidden; }

Status create_event(Event* out, unsigned flags) {
  count_call();
  if (world->used == world->events.size()) {
    world->events.emplace_back();
    if (const Status status = world->driver.event_create(&world->events.back(), flags)) return status;
  }
  *out = world->events[world->used++];
  return status::kSuccess;
}

Status record_event(Event event, Stream stream) {
  count_call();
  world->records.emplace_back(stream, event);
  return world->driver.event_record(event, stream);
}

Status query_event(Event event) {
  count_call();
  if (world->answers == Answers::kLies || world->happened(event)) return status::kSuccess;
  if (world->answers == Answers::kTrue || world->choices.choose(2) == 0) return status::kNotReady;
  return world->driver.event_synchronize(event);
}

// A wait: one of the streams comes to its next fence.
Status idle(unsigned) {
  ++world->idles;
  std::vector<Event> next;
  std::vector<Stream> streams;
  for (const auto& [stream, event] : world->records) {
    if (world->happened(event) || std::count(streams.begin(), streams.end(), stream) > 0) continue;
    streams.push_back(stream);
    next.push_back(event);
  }
  if (next.empty()) return status::kNothingCanRun;
  return world->driver.event_synchronize(next[world->choices.choose(next.size())]);
}

// --- programs ---

enum class Kind {
  kStage,     // a snapshot
  kLease,     // take a slot and fill it
  kSubmit,    // copy from a lease
  kRead,      // a kernel reads the lease in place, then retire
  kHandOver,  // of a lease
  kCancel,
  kBear,  // a tensor over a lease
  kBury,  // the tensor dies
  kAsk,   // is a ticket done?
  kWait,  // for a ticket
  kWaitOn,
  kRefill,  // an owned buffer, in place
  kReclaim,
  kRecycle,  // a stream ends and its handle is given out again
};

struct Operation {
  Kind kind;
  int which;  // lease or ticket
  int stream;
  std::size_t granules;
};
using Program = std::vector<Operation>;

// Half of the operations are submissions, without which there is nothing to reorder.
Program generate(unsigned seed) {
  std::mt19937 random(seed);
  const int streams = 1 + static_cast<int>(random() % kStreams);
  const std::size_t length = 5 + random() % (kMostOperations - 4);
  constexpr Kind kKinds[] = {
      Kind::kStage,  Kind::kStage, Kind::kStage,  Kind::kStage,  Kind::kStage,    Kind::kLease,   Kind::kSubmit,
      Kind::kSubmit, Kind::kRead,  Kind::kRefill, Kind::kRefill, Kind::kHandOver, Kind::kCancel,  Kind::kBear,
      Kind::kBury,   Kind::kAsk,   Kind::kWait,   Kind::kWaitOn, Kind::kReclaim,  Kind::kRecycle, Kind::kRecycle};
  Program program;
  while (program.size() < length) {
    program.push_back({kKinds[random() % std::size(kKinds)], static_cast<int>(random() % 8),
                       static_cast<int>(random() % static_cast<unsigned>(streams)), 1 + random() % 4 / 3});
  }
  return program;
}

std::string text_of(const Program& program) {
  static constexpr const char* kNames[] = {"stage", "lease", "submit", "read",    "hand_over", "cancel",  "bear",
                                           "bury",  "ask",   "wait",   "wait_on", "refill",    "reclaim", "recycle"};
  std::string text;
  for (const Operation& operation : program) {
    text += std::string(kNames[static_cast<int>(operation.kind)]) + "(" + std::to_string(operation.which) + "," +
            std::to_string(operation.stream) + "," + std::to_string(operation.granules) + ") ";
  }
  return text;
}

// One run of a program. The model: what reads which bytes of the pool, and what each reader must see.
class Run {
 public:
  Run(Sim& sim, char* device_bytes) : sim_(sim), device_bytes_(device_bytes) {
    Driver driver = sim.driver;
    driver.event_create = &create_event;
    driver.event_record = &record_event;
    driver.event_query = &query_event;
    driver.idle = &idle;
    device_ = std::make_shared<Device>(
        driver, sim.device.context(), DeviceKind::kSimulated, 0,
        [](void* self, int) { return static_cast<SimulatedDevice*>(self)->current_stream(); }, &sim.device);
    PoolOptions options;
    options.initial_bytes = options.max_bytes = kCapacity;
    pool_ = Pool::make(device_, options);
    for (Stream& stream : streams_) stream = sim.stream();
    std::memset(device_bytes_, SimulatedDevice::kPoison, device_bytes_size());
  }
  ~Run() {
    if (!ended_) abandon();
    for (const Stream stream : streams_) sim_.device.destroy_stream(stream);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  static constexpr std::size_t device_bytes_size() { return 2 * kMostOperations * 2 * kGranule; }

  void perform(const Operation& operation) {
    try {
      perform_unless_full(operation);
    } catch (const Error& error) {
      // The only excuse: the program itself holds the room, and nothing is in flight that could give some back.
      CHECK(error.kind() == ErrorKind::kPoolExhausted);
      CHECK(std::none_of(readers_.begin(), readers_.end(), [](const Reader& reader) { return !reader.ran(); }));
      CHECK(!holds_.empty());
    }
    check();
  }

  // Every byte arrived, and every slot comes back.
  void finish(bool drop) {
    if (drop) {
      drop_everything();
    } else {
      close_everything();
    }
    ended_ = true;
    CHECK_EQ(sim_.device.host_allocations(), 0);
    CHECK_EQ(sim_.device.violations(), 0);
    for (const Reader& reader : readers_) {
      CHECK_EQ(bytes(reader.dst, reader.nbytes), std::string(reader.nbytes, reader.value));
    }
  }

 private:
  // Bytes of the pool that the device reads, and where they go.
  struct Reader {
    const char* src;
    char* dst;
    std::size_t nbytes;
    char value;
    bool ran() const { return dst[nbytes - 1] != static_cast<char>(SimulatedDevice::kPoison); }
    bool meets(const char* p, std::size_t n) const { return src < p + n && p < src + nbytes; }
  };
  // Bytes of the pool that belong to the program: a lease, a buffer, or a tensor that outlived its lease.
  struct Hold {
    LeaseRef lease;
    char* data;
    std::size_t nbytes;
    char value;
    bool open = true, owned = false, declared = false;
    int tensors = 0;
  };
  struct Asked {
    Ticket ticket;
    std::size_t reader;
    bool done = false;
  };

  void perform_unless_full(const Operation& operation) {
    switch (operation.kind) {
      case Kind::kStage:
        return stage(operation);
      case Kind::kLease:
        return take(operation, false);
      case Kind::kRefill:
        return refill(operation);
      case Kind::kReclaim:
        pool_->reclaim(false, {});
        return;
      case Kind::kRecycle:
        sim_.device.destroy_stream(stream(operation));
        streams_[static_cast<std::size_t>(operation.stream)] = sim_.stream();
        return;
      case Kind::kAsk:
      case Kind::kWait:
      case Kind::kWaitOn:
        return ask(operation);
      default:
        return use(operation);
    }
  }

  void stage(const Operation& operation) {
    const std::size_t nbytes = operation.granules * kGranule;
    const char value = next_value();
    char* const dst = next_dst(nbytes);
    CopyPlan plan;
    plan.width = nbytes;
    const char* from = nullptr;
    Ticket ticket{device_};
    const std::size_t reader = readers_.size();
    pool_->stage(
        nbytes, plan, Sim::address(dst), stream(operation), {},
        [&](char* slot) {
          require_free(slot, nbytes);
          std::memset(slot, value, nbytes);
          from = slot;
        },
        &ticket);
    readers_.push_back({from, dst, nbytes, value});
    tickets_.push_back({ticket, reader});
  }

  void take(const Operation& operation, bool owned) {
    const std::size_t nbytes = operation.granules * kGranule;
    const LeaseRef lease = pool_->take(nbytes, {}, true, owned);
    char* const data = pool_->data(lease);
    require_free(data, nbytes);
    holds_.push_back({lease, data, nbytes, next_value()});
    holds_.back().owned = owned;
    std::memset(data, holds_.back().value, nbytes);
  }

  void refill(const Operation& operation) {
    auto buffer = std::find_if(holds_.begin(), holds_.end(), [](const Hold& hold) { return hold.owned; });
    if (buffer == holds_.end()) {
      take(operation, true);
      buffer = holds_.end() - 1;
    } else {
      pool_->wait_reusable(buffer->lease, {});
      for (const Reader& reader : readers_) CHECK(reader.ran() || !reader.meets(buffer->data, buffer->nbytes));
      buffer->value = next_value();
      std::memset(buffer->data, buffer->value, buffer->nbytes);
    }
    submit(*buffer, stream(operation));
  }

  void submit(Hold& hold, Stream on) {
    char* const dst = next_dst(hold.nbytes);
    CopyPlan plan;
    plan.width = hold.nbytes;
    const std::size_t reader = readers_.size();
    readers_.push_back({hold.data, dst, hold.nbytes, hold.value});
    tickets_.push_back({pool_->submit(hold.lease, plan, Sim::address(dst), on), reader});
    hold.declared = true;
  }

  void read_in_place(Hold& hold, Stream on) {
    char* const dst = next_dst(hold.nbytes);
    const std::size_t reader = readers_.size();
    readers_.push_back({hold.data, dst, hold.nbytes, hold.value});
    CHECK_EQ(sim_.device.launch(on, [dst, from = hold.data, n = hold.nbytes] { std::memcpy(dst, from, n); }),
             status::kSuccess);
    tickets_.push_back({pool_->retire(hold.lease, on), reader});
    hold.declared = true;
  }

  // What needs a lease takes one where there is none.
  void use(const Operation& operation) {
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < holds_.size(); ++i) {
      if (holds_[i].open && !holds_[i].owned) open.push_back(i);
    }
    if (operation.kind == Kind::kBury) {
      const auto with = std::find_if(holds_.begin(), holds_.end(), [](const Hold& hold) { return hold.tensors > 0; });
      if (with == holds_.end()) return;
      --with->tensors;
      pool_->tensor_died(with->lease.slot);
      if (!with->open && with->tensors == 0) holds_.erase(with);
      return;
    }
    if (open.empty()) return take(operation, false);
    const std::size_t at = open[static_cast<std::size_t>(operation.which) % open.size()];
    Hold& hold = holds_[at];
    switch (operation.kind) {
      case Kind::kSubmit:
        return submit(hold, stream(operation));
      case Kind::kRead:
        return read_in_place(hold, stream(operation));
      case Kind::kBear:
        pool_->tensor_born(hold.lease);
        ++hold.tensors;
        return;
      case Kind::kCancel:
      case Kind::kHandOver:
        return end(at);
      default:
        throw std::logic_error("not an operation on a lease");
    }
  }

  void end(std::size_t at) {
    Hold& hold = holds_[at];
    if (hold.declared || hold.owned) {
      CHECK(pool_->hand_over(hold.lease));
    } else {
      pool_->cancel(hold.lease);
    }
    hold.open = false;
    if (hold.tensors == 0) holds_.erase(holds_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void ask(const Operation& operation) {
    if (tickets_.empty()) return;
    Asked& asked = tickets_[static_cast<std::size_t>(operation.which) % tickets_.size()];
    if (operation.kind == Kind::kWaitOn) return asked.ticket.wait_on(stream(operation), *asked.ticket.device);
    if (operation.kind == Kind::kWait) asked.ticket.wait({});
    const bool done = asked.ticket.done();
    CHECK(done || operation.kind == Kind::kAsk);
    CHECK(done || !asked.done);  // I4
    CHECK(!done || readers_[asked.reader].ran());
    asked.done = done;
  }

  // I5: nobody else may read or hold the bytes that were just handed out.
  void require_free(const char* slot, std::size_t nbytes) const {
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(slot) % kGranule, 0);  // I3
    for (const Reader& reader : readers_) CHECK(reader.ran() || !reader.meets(slot, nbytes));
    for (const Hold& hold : holds_) CHECK(slot + nbytes <= hold.data || hold.data + hold.nbytes <= slot);
  }

  void check() {
    CHECK(pool_->consistent());  // I1, I2
    const PoolStats stats = pool_->stats();
    CHECK(stats.capacity <= kCapacity && stats.slabs <= 1 && stats.host_allocations <= 1);  // I7
    CHECK(stats.events_created <= 3 * Fifo::kBatch);
    std::set<const char*> taken;  // granules that the device reads or the program holds
    const auto take = [&](const char* p, std::size_t n) {
      for (std::size_t i = 0; i < n; i += kGranule) taken.insert(p + i);
    };
    for (const Reader& reader : readers_) {
      if (!reader.ran()) take(reader.src, reader.nbytes);
    }
    for (const Hold& hold : holds_) {
      take(hold.data, hold.nbytes);
      CHECK_EQ(bytes(hold.data, hold.nbytes), std::string(hold.nbytes, hold.value));  // nobody wrote it
    }
    const auto in = [&](SlotState state) { return stats.bytes[static_cast<int>(state)]; };
    CHECK(in(SlotState::kFree) + taken.size() * kGranule <= stats.capacity);  // I5
    CHECK_EQ(in(SlotState::kParked) + in(SlotState::kQuarantined), 0);
    std::uint64_t completed = 0;
    for (const Fifo* fifo : device_->retirement().fifos()) {
      CHECK(fifo->completed() <= fifo->submitted());  // I4
      completed += fifo->completed();
    }
    CHECK(completed >= completed_);
    completed_ = completed;
    CHECK(world->idles <= static_cast<int>(world->records.size()));  // I6: each wait saw something come
  }

  void end_holds() {
    while (!holds_.empty()) {
      Hold& hold = holds_.back();
      for (; hold.tensors > 0; --hold.tensors) pool_->tensor_died(hold.lease.slot);
      if (hold.open) {
        end(holds_.size() - 1);
      } else {
        holds_.pop_back();
      }
    }
  }

  void close_everything() {
    CHECK_EQ(sim_.device.synchronize(), status::kSuccess);
    if (world->answers == Answers::kChosen) world->answers = Answers::kTrue;
    end_holds();
    pool_->reclaim(false, {});
    const PoolStats stats = pool_->stats();
    CHECK_EQ(stats.bytes[static_cast<int>(SlotState::kFree)], stats.capacity);
    if (stats.capacity > 0) pool_->cancel(pool_->take(kCapacity, {}));  // nothing is stranded
    pool_->close({});
    CHECK_EQ(pool_->stats().capacity, 0);
    device_->shutdown();
  }

  // I8: the owner goes while copies are in flight; no destructor calls the driver, and the memory comes back later.
  void drop_everything() {
    world->calls_forbidden = true;
    end_holds();
    pool_->abandon();
    pool_.reset();
    world->calls_forbidden = false;
    CHECK(!world->called_while_forbidden);
    CHECK_EQ(sim_.device.synchronize(), status::kSuccess);
    if (world->answers == Answers::kChosen) world->answers = Answers::kTrue;
    device_->poll_all();
    device_->sweep();
    device_->shutdown();
  }

  void abandon() noexcept {
    world->answers = Answers::kTrue;
    sim_.device.synchronize();
    holds_.clear();
    tickets_.clear();
    device_->release_pools();
    device_->shutdown();
  }

  Stream stream(const Operation& operation) const { return streams_[static_cast<std::size_t>(operation.stream)]; }
  char next_value() { return ++value_; }
  char* next_dst(std::size_t nbytes) {
    char* const dst = device_bytes_ + dst_used_;
    dst_used_ += nbytes;
    return dst;
  }

  Sim& sim_;
  char* const device_bytes_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Pool> pool_;
  std::array<Stream, kStreams> streams_{};
  std::vector<Reader> readers_;
  std::vector<Hold> holds_;
  std::vector<Asked> tickets_;
  char value_ = 0;
  std::size_t dst_used_ = 0;
  std::uint64_t completed_ = 0;
  bool ended_ = false;
};

// Walks all schedules of one program. Returns how many there are.
std::uint64_t walk(const Program& program, Answers answers) {
  Sim sim(Schedule::kLate);
  World here;
  here.driver = sim.driver;
  world = &here;
  char* const device_bytes = sim.heap(Run::device_bytes_size());
  std::uint64_t schedules = 0;
  do {
    here.answers = answers;
    here.used = 0;
    here.idles = 0;
    here.records.clear();
    here.called_while_forbidden = here.calls_forbidden = false;
    try {
      Run run(sim, device_bytes);
      for (const Operation& operation : program) run.perform(operation);
      run.finish(schedules % 2 == 1);
    } catch (const std::exception& error) {
      SimulatedDevice::heap_free(device_bytes);
      throw std::runtime_error("program " + text_of(program) + "schedule " + here.choices.text() + ": " + error.what());
    }
    ++schedules;
  } while (here.choices.next());
  SimulatedDevice::heap_free(device_bytes);
  return schedules;
}

constexpr unsigned kPrograms = 1000;

TEST("in every order of completion of every program the invariants hold and every byte arrives") {
  std::uint64_t schedules = 0, most = 0;
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    const std::uint64_t of_program = walk(generate(seed), Answers::kChosen);
    schedules += of_program;
    most = std::max(most, of_program);
  }
  std::printf("  %u programs, %llu schedules, at most %llu of one\n", kPrograms,
              static_cast<unsigned long long>(schedules), static_cast<unsigned long long>(most));
  CHECK(schedules > 10 * kPrograms);
}

TEST("control: where queries lie, the same programs go wrong") {
  unsigned caught = 0;
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    try {
      walk(generate(seed), Answers::kLies);
    } catch (const std::runtime_error&) {
      ++caught;
    }
  }
  std::printf("  %u of %u programs\n", caught, kPrograms);
  CHECK(caught > kPrograms / 4);
}

}  // namespace
