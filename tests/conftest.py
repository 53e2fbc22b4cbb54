"""What all tests share."""

import signal

# A shell starts commands in the background with SIGINT ignored, and processes inherit that: tests
# that interrupt a command would wait for an end that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
