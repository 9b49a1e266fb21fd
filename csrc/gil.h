// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Letting go of the GIL around a wait, so that the process can end meanwhile.
//
// Before Python 3.14 a daemon thread that takes the GIL while the interpreter goes away is ended on the spot, by
// unwinding its stack; with C++ on that stack this is std::terminate, and the exit status SIGABRT. So once
// prepare_exit() was called (from an atexit callback), a thread that comes back from a wait sleeps for good instead.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace pinstage {

class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() { take_back(); }

  // Runs `call` with the GIL, amid a scope that is without. No lock may be held.
  template <class Call>
  void with_gil(Call&& call) {
    take_back();
    const Released again{*this};
    call();
  }

 private:
  struct Released {
    ReleasedGil& gil;
    ~Released() { gil.state_ = PyEval_SaveThread(); }
  };

  void take_back() {
    returning().fetch_add(1);  // before the look at exiting(): prepare_exit() waits for those that saw it false
    if (exiting().load() && std::this_thread::get_id() != exit_thread()) {
      returning().fetch_sub(1);
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    returning().fetch_sub(1);
  }

  friend void prepare_exit();
  friend void forget_threads_after_fork();

  static std::atomic<int>& returning() {
    static std::atomic<int> threads{0};
    return threads;
  }
  static std::atomic<bool>& exiting() {
    static std::atomic<bool> flag{false};
    return flag;
  }
  static std::thread::id& exit_thread() {
    static std::thread::id id;
    return id;
  }

  PyThreadState* state_;
};

// In a forked child, which has none of the threads that were on their way back.
inline void forget_threads_after_fork() { ReleasedGil::returning().store(0); }

// With the GIL, on the thread that ends the interpreter.
inline void prepare_exit() {
  ReleasedGil::exit_thread() = std::this_thread::get_id();
  ReleasedGil::exiting().store(true);
  PyThreadState* const state = PyEval_SaveThread();  // for those that are taking the GIL already
  while (ReleasedGil::returning().load() > 0) std::this_thread::yield();
  PyEval_RestoreThread(state);
}

}  // namespace pinstage
