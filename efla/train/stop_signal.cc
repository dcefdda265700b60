#include "efla/train/stop_signal.h"

#include <signal.h>
#include <unistd.h>

namespace efla {
namespace {

// Signal handlers can reach only statics.
volatile sig_atomic_t received_signal = 0;
struct sigaction former_interrupt, former_terminate;

void note(int signal) {
  if (received_signal != 0) {
    constexpr char kMessage[] = "\nefla: stopped at once; the last checkpoint is intact\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
    ::_exit(1);
  }
  received_signal = signal;
}

}  // namespace

StopSignal::StopSignal() {
  received_signal = 0;
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;  // a checkpoint being written goes on
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, &former_interrupt);
  ::sigaction(SIGTERM, &action, &former_terminate);
}

StopSignal::~StopSignal() {
  ::sigaction(SIGINT, &former_interrupt, nullptr);
  ::sigaction(SIGTERM, &former_terminate, nullptr);
}

const char* StopSignal::received() {
  if (received_signal == 0) return nullptr;
  return received_signal == SIGINT ? "SIGINT" : "SIGTERM";
}

}  // namespace efla
