"""Chat templates: what authors rely on, and what a hostile one is stopped from doing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.gateway.chat_template import ChatTemplate

MESSAGES = [{"role": "system", "content": "<é>"}, {"role": "user", "content": "hi"}]


def render(source: str, **limits: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, **limits).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}",
            "<s>system:<é>;user:hi;",
        ),
        (
            "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}\n  {% endif %}\n{{ m.role }}\n{% endfor %}",
            "user\n",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{% if add_generation_prompt and not tools %}go{% endif %}", "go"),
        (
            "{{ '%s-%02d' % ('a', 3) }}{{ '{:>3}'.format(1) }}{{ 'a' ~ 1 ~ 'b' }}{{ 'ab' | replace('a', 'xy') }}",
            "a-03  1a1bxyb",
        ),
        (
            "{% set x %}{{ 'a' }}{{ 'b' }}{% endset %}{{ x * 2 }}{{ 'x' | indent(2, true) }}{{ 'x' | center(3) }}",
            "abab  x x ",
        ),
        ("{{ missing }}|{{ strftime_now('%Y') | length }}", "|4"),
        (
            "{{ messages[1:] | map(attribute='role') | join(',') }}{{ [1] + [2] }}{{ 7 % 4 }}{{ 2 ** 5 }}",
            "user[1, 2]332",
        ),
    ],
)
def test_templates_render_as_their_authors_expect(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_refuses_messages_with_its_own_words() -> None:
    with pytest.raises(QuireError, match="roles must alternate") as failure:
        render("{{ raise_exception('roles must alternate') }}")
    assert (failure.value.reason, failure.value.field) == (Reason.INVALID_FIELD, "chat")


@pytest.mark.parametrize(
    "source", ["{{ nothing.at.all }}", "{{ messages[9].role }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ 'a'.b() }}"]
)
def test_a_failing_template_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(QuireError) as failure:
        render(source)
    assert failure.value.reason is Reason.INVALID_FIELD


def test_a_broken_template_is_an_error_of_the_model() -> None:
    with pytest.raises(QuireError) as failure:
        render("{% for m in messages %}")
    assert failure.value.reason is Reason.MODEL_LOAD_FAILED


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{% if loop.depth < 2 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        (
            "{% macro m(n) %}{% for i in range(999) %}{% if n < 9 %}{{ m(n + 1) }}{% endif %}"
            "{% endfor %}{% endmacro %}{{ m(0) }}"
        ),
        (
            "{% set x = range(99999) | list %}{% for i in range(99999) %}"
            "{% if x | sum == 1 %}{% endif %}{{ x | map('string') | join | length }}{% endfor %}"
        ),
    ],
)
def test_s2_endless_loops_end_within_their_budget(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(QuireError, match=r"took more than 0\.1 s"):
        render(source, cpu_seconds=0.1)
    assert time.thread_time() - start < 1.5


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set x %}"
            "{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(s='aa') %}{% for i in range(9) %}{% set ns.s = ns.s | replace('a', ns.s) %}"
            "{% endfor %}"
        ),
        "{% set ns = namespace(s='aa') %}{% for i in range(9) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['os'] }}",
    ],
)
def test_s2_hostile_templates_are_stopped_before_they_take_memory(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(QuireError) as failure:
        render(source, cpu_seconds=1.0, max_characters=1_000_000)
    assert failure.value.reason is Reason.INVALID_FIELD
    assert time.thread_time() - start < 1.5


def test_s2_messages_are_text_not_templates() -> None:
    content = "{{ 9 * 9 }}{% for i in range(9) %}"
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": content}]) == content


def test_s2_other_threads_go_on_and_their_tracing_is_left_alone() -> None:
    ticks = 0
    end = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not end.wait(0.005):
            ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    try:
        with pytest.raises(QuireError):
            render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", cpu_seconds=0.3)
    finally:
        end.set()
        other.join()
    assert ticks > 5
