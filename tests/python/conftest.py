"""Pytest set-up: markers, and the closing table of errors of the device tests."""

import device_support
import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "huge: needs tens of GiB of device memory")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item):
    yield
    if item.get_closest_marker("huge") and torch.cuda.is_available():
        torch.cuda.empty_cache()  # for what runs beside this process


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        session.config.workeroutput["worst"] = device_support.errors_as_rows()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    device_support.add_rows(getattr(node, "workeroutput", {}).get("worst", []))


def pytest_terminal_summary(terminalreporter):
    for line in device_support.worst_errors():
        terminalreporter.write_line(line)
