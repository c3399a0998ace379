import pytest

from miniseries.training.schedule import learning_rate_at

D48 = {"peak": 6e-4, "warmup_steps": 700, "max_steps": 32000, "final_fraction": 0.1}


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 8.571428571e-07), (699, 6e-4), (700, 6e-4), (16350, 3.3e-4), (32000, 6e-5)],
)
def test_cosine_has_the_rates_of_llm_c_s_1558m_run(step, expected):
    assert learning_rate_at(step, schedule="cosine", **D48) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 6e-4 / 700), (700, 6e-4), (16350, 3.3e-4), (24175, 1.95e-4), (32000, 6e-5)],
)
def test_linear_falls_in_a_straight_line_to_its_last_value(step, expected):
    assert learning_rate_at(step, schedule="linear", **D48) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(699, 6e-4), (25599, 6e-4), (25600, 6e-4), (27200, 3.3e-4), (32000, 6e-5)],
)
def test_wsd_stays_at_its_peak_and_decays_by_one_minus_root_in_the_last_fifth(step, expected):
    assert learning_rate_at(step, schedule="wsd", **D48) == pytest.approx(expected, rel=1e-6)


def test_constant_ignores_the_warm_up_as_llm_c_does():
    assert {learning_rate_at(s, schedule="constant", **D48) for s in (0, 5, 31999)} == {6e-4}


def test_an_unknown_schedule_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="choose cosine, linear, constant or wsd"):
        learning_rate_at(700, schedule="triangle", **D48)
