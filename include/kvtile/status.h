// Status: how every call reports failure. The library never throws across its API, prints or
// aborts; a failed call has written nothing. Messages read "argument: got X, wanted Y".
#pragma once

#include <string>
#include <utility>

namespace kvtile {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,    // a value no build could accept
  kUnsupported = 2,        // well formed, but outside what the backend's support predicate names
  kWorkspaceTooSmall = 3,  // message gives need and have, in bytes
  kOutOfRange = 4,         // a block table entry, slot or length points outside what was granted
  kValueOverflow = 5,      // checked encode: a norm, scale or zero does not fit its fp16 word
  kNonFinite = 6,          // checked encode: NaN or infinity in the input
  kUnavailable = 7,        // backend or device is not present on this machine
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace kvtile
