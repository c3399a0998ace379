"""What all tests need before they import anything."""

import os
import signal

# One thread a process: tests run side by side, and threads that wait for each other crawl.
os.environ["OMP_NUM_THREADS"] = "1"  # read when PyTorch is loaded

import pytest
import torch
from hub import running_hub

# Without a GPU Triton's interpreter runs its kernels; Triton asks when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup lets them ignore
# the end of the terminal, and what they start inherits it; the tests of signals need them heard.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, heard)


@pytest.fixture(name="hub")
def hub_fixture(monkeypatch, tmp_path):
    """A stand-in for the Hugging Face hub, and the environment that leads to it."""
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("NO_PROXY", "*")
        yield server


@pytest.fixture
def offline(monkeypatch):
    """Any connection is an error."""

    def refuse(*_arguments):
        raise AssertionError("tried to connect")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
