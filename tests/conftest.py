"""What all tests need before they import anything."""

import os
import signal

# One thread a process: tests run side by side, and threads that wait for each other crawl.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup lets them ignore
# the end of the terminal, and what they start inherits it; the tests of signals need them heard.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, heard)
