// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "check.h"
#include "seeded_bugs.h"

namespace pinstage::check {

std::vector<Test>& tests() {
  static std::vector<Test> all;  // inside a function: other files register before main, in any order
  return all;
}

std::uint64_t printed_seed() {
  std::uint64_t seed = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  if (const char* text = std::getenv("PINSTAGE_TEST_SEED")) {
    char* end = nullptr;
    seed = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0') throw std::invalid_argument("PINSTAGE_TEST_SEED must be a decimal number");
  }
  std::printf("  PINSTAGE_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return seed;
}

namespace {

constexpr const char* kUsage =
    "usage: pinstage_native_tests [part of a test's name | --list | --seeded-bug=address|undefined|thread]\n";

bool passes(const Test& test) {
  std::puts(test.name);
  std::fflush(stdout);  // a crash must leave the name of the test that crashed
  try {
    test.run();
    return true;
  } catch (const std::exception& error) {
    std::printf("  FAILED %s\n", error.what());
  } catch (...) {
    std::puts("  FAILED by an exception that is no std::exception");
  }
  return false;
}

int list() {
  for (const Test& test : tests()) std::puts(test.name);
  return 0;
}

int seed_bug(const std::string& kind) {
  if (!run_seeded_bug(kind)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  std::puts("the seeded bug did not stop this program");
  return 0;
}

int run(const std::string& part_of_name) {
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (std::string(test.name).find(part_of_name) != std::string::npos) ++(passes(test) ? passed : failed);
  }
  const bool vacuous = passed + failed == 0;
  if (vacuous) std::fprintf(stderr, "no test's name contains '%s'\n", part_of_name.c_str());
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || vacuous ? 1 : 0;
}

int main_with(const std::string& argument) {
  const std::string seeded_bug = "--seeded-bug=";
  if (argument == "--list") return list();
  if (argument.compare(0, seeded_bug.size(), seeded_bug) == 0) return seed_bug(argument.substr(seeded_bug.size()));
  if (argument.compare(0, 1, "-") == 0) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  return run(argument);
}

}  // namespace
}  // namespace pinstage::check

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fputs(pinstage::check::kUsage, stderr);
    return 2;
  }
  return pinstage::check::main_with(argc == 2 ? argv[1] : "");
}
