// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// A test harness in one header.
//
//   TEST("a slow stream does not hold back a fast one") {      // the name is a fact
//     CHECK(pool.empty());                                     // a failed check ends the test
//     CHECK_EQ(pool.free_bytes(), 4096);                       // and prints both values
//     CHECK(throws<std::invalid_argument>([] { Offsets(0); }));
//     run_together(4, [&](int i) { ... });                     // four threads that truly overlap
//   }
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace pinstage::check {

struct Test {
  const char* name;
  void (*run)();
};

std::vector<Test>& tests();  // in order of registration

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

struct Failure : std::runtime_error {
  Failure(const char* file, int line, const std::string& what)
      : std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what) {}
};

template <class T, class = void>
struct IsPrintable : std::false_type {};
template <class T>
struct IsPrintable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>>
    : std::true_type {};

template <class T>
std::string describe(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<T>) {
    return describe(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);  // bytes as numbers, not as characters
  } else if constexpr (IsPrintable<T>::value) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else {
    return "(a value that cannot be printed)";
  }
}

// As ==, but an int literal may be compared with a std::size_t: a negative number equals no unsigned one.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && std::is_signed_v<A> != std::is_signed_v<B>) {
    if constexpr (std::is_signed_v<A>) {
      return a >= 0 && static_cast<std::make_unsigned_t<A>>(a) == b;
    } else {
      return equal(b, a);
    }
  } else {
    return a == b;
  }
}

template <class A, class B>
void require_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!equal(a, b)) throw Failure(file, line, std::string(text) + ": " + describe(a) + " is not " + describe(b));
}

template <class Error, class Fn>
bool throws(Fn fn) {
  try {
    fn();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// A seed for this test, printed so that a failure can be repeated with PINSTAGE_TEST_SEED=<seed>.
std::uint64_t printed_seed();

// Holds each of `n` threads until all have arrived, then lets them go at once. Reusable. It spins rather than sleeps,
// because sleepers wake one after the other and would hardly overlap.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}

  void arrive_and_wait() {
    const unsigned round = round_.load();
    if (arrived_.fetch_add(1) + 1 == n_) {
      arrived_.store(0);
      round_.store(round + 1);
      return;
    }
    while (round_.load() == round) std::this_thread::yield();
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

// Runs fn(0) ... fn(n - 1) on n threads that start on a barrier; rethrows the first failure once all have ended.
template <class Fn>
void run_together(int n, Fn fn) {
  Barrier barrier(n);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      barrier.arrive_and_wait();
      try {
        fn(i);
      } catch (...) {
        failures[static_cast<std::size_t>(i)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace pinstage::check

#define PINSTAGE_JOIN_(a, b) a##b
#define PINSTAGE_JOIN(a, b) PINSTAGE_JOIN_(a, b)
#define TEST(name)                                                                             \
  static void PINSTAGE_JOIN(test_at_line_, __LINE__)();                                        \
  static const ::pinstage::check::Registration PINSTAGE_JOIN(registration_at_line_, __LINE__)( \
      name, &PINSTAGE_JOIN(test_at_line_, __LINE__));                                          \
  static void PINSTAGE_JOIN(test_at_line_, __LINE__)()

#define CHECK(...)                                                                          \
  do {                                                                                      \
    if (!(__VA_ARGS__)) throw ::pinstage::check::Failure(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)
#define CHECK_EQ(a, b) ::pinstage::check::require_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
