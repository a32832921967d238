"""fastmha's threads under threadpoolctl."""

import pytest

import fastmha

threadpoolctl = pytest.importorskip("threadpoolctl")
integration = pytest.importorskip("fastmha.integrations.threadpoolctl")


def records():
    return [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "fastmha"]


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    integration.register()  # again: nothing happens


def test_the_team_is_found_once():
    (record,) = records()
    assert record["num_threads"] == fastmha.get_num_threads()
    assert record["version"] == fastmha.__version__


@pytest.mark.parametrize(
    "limits", [{"limits": 1}, {"limits": {"fastmha": 1}}, {"limits": 1, "user_api": "fastmha"}], ids=str
)
def test_limits_hold_and_end(limits):
    with fastmha.num_threads(3):
        with threadpoolctl.threadpool_limits(**limits):
            assert fastmha.get_num_threads() == 1
        assert fastmha.get_num_threads() == 3


def test_other_libraries_limits_leave_it_alone():
    with fastmha.num_threads(3), threadpoolctl.threadpool_limits(1, user_api="blas"):
        assert fastmha.get_num_threads() == 3
