// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// Letting go of the GIL around driver calls and waits.
//
// Before Python 3.14 a daemon thread that takes the GIL while the interpreter goes away is ended on the spot, by
// unwinding its stack; with C++ on that stack this is std::terminate, and the exit status SIGABRT. So once
// prepare_exit() was called (from an atexit callback), a thread that comes back from a wait sleeps for good instead.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "gil_queue.h"

namespace pinstage {

class ReleasedGil {
 public:
  ReleasedGil() { let_go(); }
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
    ~Released() { gil.let_go(); }
  };

  void let_go() {
    state_ = PyEval_SaveThread();
    queue().let_go();
  }

  void take_back() {
    queue().wait_for_turn();  // before the look at exiting(): prepare_exit() waits for those that saw it false
    if (exiting().load() && std::this_thread::get_id() != exit_thread()) {
      queue().gave_up();
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    queue().got();
  }

  friend void prepare_exit();
  friend void forget_threads_after_fork();

  static GilQueue& queue() {
    static GilQueue queue;
    return queue;
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

inline void forget_threads_after_fork() { ReleasedGil::queue().forget(); }

// With the GIL, on the thread that ends the interpreter.
inline void prepare_exit() {
  ReleasedGil::exit_thread() = std::this_thread::get_id();
  ReleasedGil::exiting().store(true);
  PyThreadState* const state = PyEval_SaveThread();  // for those that are taking the GIL already
  while (ReleasedGil::queue().asked()) std::this_thread::yield();
  PyEval_RestoreThread(state);
}

}  // namespace pinstage
