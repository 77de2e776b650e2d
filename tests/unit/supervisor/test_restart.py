from quire.supervisor.restart import GiveUp, History, Restart, RestartPolicy, decide, describe_exit

POLICY = RestartPolicy(first_delay=0.5, factor=2, longest_delay=4, calm_seconds=30, start_attempts=3)


def deaths(*healthy_seconds: float | None) -> History:
    history = History()
    for seconds in healthy_seconds:
        history = history.after_death(seconds, POLICY)
    return history


def test_delays_double_up_to_the_longest() -> None:
    delays = []
    for count in range(1, 7):
        decision = decide(deaths(*[1.0] * count), 1, POLICY)
        assert isinstance(decision, Restart)
        delays.append(decision.delay)
    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_calm_life_forgives_earlier_deaths() -> None:
    assert decide(deaths(1.0, 1.0, 1.0, 31.0), 1, POLICY) == Restart(0.5)


def test_given_up_when_never_healthy() -> None:
    assert decide(deaths(None, None), 1, POLICY) == Restart(1.0)
    assert isinstance(decide(deaths(None, None, None), 1, POLICY), GiveUp)


def test_once_healthy_it_is_restarted_for_ever() -> None:
    assert decide(deaths(5.0, *[None] * 1000), 1, POLICY) == Restart(4.0)


def test_refused_settings_are_given_up_at_once_but_only_at_the_start() -> None:
    assert decide(deaths(None), 2, POLICY) == GiveUp("it refused its settings or model")
    assert decide(deaths(5.0, None), 2, POLICY) == Restart(1.0)


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(-127) == "signal 127"


def test_an_orderly_end_is_no_failure() -> None:
    assert decide(deaths(1.0, 1.0, 1.0), 0, POLICY) == Restart(0.5)
    assert isinstance(decide(deaths(None, None, None), 0, POLICY), GiveUp)
