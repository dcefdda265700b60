// The errors that reach a user: one sentence saying what, where and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace efla {

/// Something failed (a file, the data, the machine); programs exit with code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller asked for something that cannot be (bad option, bad config); programs exit with 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace efla
