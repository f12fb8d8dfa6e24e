"""Chat templates: equal to transformers on the constructs of released templates, and nothing a bad template can do."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

from penstock.child import Child, ChildDied
from penstock.errors import CheckpointError, DTypeError, InvalidArgument
from penstock.text import template as template_module
from penstock.text import template_child
from penstock.text.template import ChatTemplates, special_tokens, templates_in

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
HI = [{"role": "user", "content": "hi"}]


def render(source, messages=None, tools=None, add_generation_prompt=True, seconds=2.0, **variables):
    templates = ChatTemplates({"default": (source, "chat_template.jinja")}, SPECIAL, max_seconds=seconds)
    return templates.render(HI if messages is None else messages, tools, add_generation_prompt, variables)


# as transformers renders them

QWEN = r"""
{%- macro render_content(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if item.type == 'text' %}{{- item.text }}{%- else %}{{- raise_exception('not text') }}{%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" ~ (tool | tojson) }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not render_content(message.content).startswith('<tool') %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render_content(message.content)|trim %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
                {%- for name, value in call.arguments|items %}
                    {%- set nested = value is mapping or (value is sequence and value is not string) %}
                    {{- '<parameter=' + name + '>\n' }}
                    {{- value | tojson | safe if nested else value | string }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

GEMMA = r"""
{%- macro kind(value) -%}
    {%- if value is string -%}{{ '<q>' ~ value ~ '<q>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        {
        {%- set ns = namespace(found_first=false) -%}
        {%- for key, item in value | dictsort -%}
            {%- if ns.found_first %},{% endif -%}{%- set ns.found_first = true -%}
            {{ key }}:{{ kind(item) }}
        {%- endfor -%}
        }
    {%- elif value is sequence -%}
        [{%- for item in value -%}{{ kind(item) }}{%- if not loop.last %},{% endif -%}{%- endfor -%}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro strip(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- if '<|channel>' in part -%}{%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
        {%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{{ bos_token }}
{%- if messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<start>system\n' ~ messages[0]['content'] | trim ~ '<end>\n' -}}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for tool in tools or [] -%}
    {{- '<decl>' ~ tool['function']['name'] ~ kind(tool['function']['parameters']) ~ '</decl>' -}}
{%- endfor %}
{% for message in loop_messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start>' + role }}
    {% if message['content'] is string %}
        {{- strip(message['content']) -}}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{- item['text'] | trim -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.get('tool_calls') or [] -%}
        {{- '<call>' ~ call['function']['name'] ~ kind(call['function']['arguments']) ~ '</call>' -}}
    {%- endfor -%}
    {{ '<end>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}
"""

DEEPSEEK = r"""
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='', last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- set ns.system_prompt = ns.system_prompt + ('' if ns.is_first else '\n\n') + message['content'] %}
    {%- set ns.is_first = true %}
{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- if tools %}{{- '\n\n## Tools' }}{%- for t in tools %}{{- '\n' ~ t.function | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + (message['content'] if message['content'] is string else '?')}}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['content'] is none %}
        {{- '<｜Assistant｜>' }}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}{{ '<｜calls｜>' }}{% endif %}
            {{- '%s<｜sep｜>%s' | format(tool['function']['name'], tool['function']['arguments'] | tojson) }}
        {%- endfor %}{{ '{}'.format(eos_token) }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
        {{- '<｜Assistant｜>' ~ content ~ eos_token }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<｜output｜>' + message['content']|string|replace('<', '[') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages | selectattr('role', 'equalto', 'user') | list | length %}
    {{- '<｜Assistant｜>' }}
{%- endif %}
"""

ODDS = r"""
{{ messages | map(attribute='role') | join(', ') }} {{ messages | map(attribute='role') | unique | list }}
{{ [3, 1, 2] | sort | first }} {{ {'b': 1, 'a': [1.5, none, true, 'ä"<']} | tojson(sort_keys=true) }}
{{ {'a': [1]} | tojson(indent=4) }} {{ {'a': 1} | tojson(separators=(',', ':')) }} {{ 'ä' | tojson(ensure_ascii=true) }}
  {% for n in range(10) %}
    {%- if n is odd %}{% continue %}{% endif %}{% if n > 6 %}{% break %}{% endif %}{{ loop.index ~ ':' ~ n ~ ' ' }}
  {%- else %}never{% endfor %}
{% set x, y = (1, 2) %}{{ x + y }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 1 / 4 }} {{ -x }}
{{ '%05.1f|%s' % (2.25, [1]) }} {{ 'a b c'.split() }} {{ 'abc'[::-1] }} {{ 'abc'[1] }} {{ 'x'.join(['1', '2']) }}
{{ 'abc'.replace('b', 'BB') }} {{ 'a' * 3 }} {{ '{0:>5}|{0}'.format(7) }} {{ '{a}'.format_map({'a': 1}) }}
{{ 'a'.center(5) }} {{ 'title me' | title | indent(2, true) }} {{ missing is defined }} {{ missing | default('d') }}
{{ none | string }} {{ '<b>' | e }} {{ [[1, 2], [3]] | sum(start=[]) }} {{ ('<' | safe) + '>' }}
{% macro outer() %}[{{ caller('c') }}]{% endmacro %}{% call(v) outer() %}{{ v }}!{% endcall %}
{% set block %}b{{ 1 }}{% endset %}{{ block | upper }} {% filter upper %}up{% endfilter %}
{{ dict(a=1).items() | list }}
{% for tree in [[1, [2, [3]]]] recursive %}{{ tree if tree is number else '(' ~ loop(tree) ~ ')' }}{% endfor %}
{% for group in [{'k': 1, 'v': 'a'}, {'k': 2, 'v': 'b'}, {'k': 1, 'v': 'c'}] | groupby('k') %}
{{ group.grouper }}={{ group.list | map(attribute='v') | join }}
{% endfor %}
{{ [1, 2, 3, 4] | batch(3) | list }} {{ 'a,b' | replace(',', ';') }} {{ 3.14159 | round(2) }}
{{ ['a'] + ['b'] }} {{ [0] * 3 }} {{ documents is none }} {{ tools is none }} {{ eos_token }} {{ pad_token }}
{{ cls_token is defined }} {# gone #} {{ 'x' in 'xyz' }} {{ 'a-b'.partition('-') }} {{ [1, 2] == [1, 2] }}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "description": "Dreht <etwas> & mehr",
            "parameters": {
                "type": "object",
                "properties": {"by": {"type": "integer", "enum": [1, 2]}},
                "required": ["by"],
            },
        },
    }
]
CALLS = [
    {"type": "function", "id": "1", "function": {"name": "turn", "arguments": {"by": 2, "to": ["ü", {"z": None}]}}}
]
CHATS = {
    "one": HI,
    "system": [{"role": "system", "content": " be brief "}, *HI, {"role": "assistant", "content": "yes"}, *HI],
    "tools": [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "42 <ok>"},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\ndone"},
    ],
    "thought": [*HI, {"role": "assistant", "content": "a", "reasoning_content": "b"}, {"role": "user", "content": ""}],
    "unicode": [{"role": "user", "content": "東京 😀 <|im_end|> {{ 1 }} \u2028\x00"}],
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]


@pytest.fixture(scope="module")
def transformers_render():
    """transformers' rendering of a template, with the variables its tokenizers give."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    def run(source, messages, tools, add_generation_prompt, **variables):
        (text,), _ = utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            **SPECIAL,
            **variables,
        )
        return text

    return run


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [QWEN, GEMMA, DEEPSEEK, ODDS], ids=["qwen", "gemma", "deepseek", "odds"])
def test_render_equals_transformers(source, chat, transformers_render):
    templates = ChatTemplates({"default": (source, "t")}, SPECIAL)
    for tools in (None, [], TOOLS):
        for add_generation_prompt, variables in ((True, {}), (False, {}), (True, {"enable_thinking": False})):
            got = templates.render(CHATS[chat], tools, add_generation_prompt, variables)
            assert got == transformers_render(source, CHATS[chat], tools, add_generation_prompt, **variables)


@pytest.mark.parametrize("source", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_render_passes_parts_to_templates_that_go_through_them(source, transformers_render):
    assert render(source, PARTS) == transformers_render(source, PARTS, None, True)


def test_render_joins_parts_for_templates_that_take_strings():
    assert render("{% for m in messages %}{{ m['content'] }}{% endfor %}", PARTS) == "a b"
    assert render("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}", PARTS) == "[a ][b]"
    assert render("{% set c = messages[0].content %}{% for p in c %}[{{ p.text }}]{% endfor %}", PARTS) == "[a ][b]"


def test_render_gives_the_date_of_today():
    text = render("{{ strftime_now('%Y') }}")
    assert re.fullmatch(r"\d{4}", text)


def test_render_gives_the_time_of_the_zone(monkeypatch, fresh_child):
    monkeypatch.setenv("TZ", "ABC-9:30")
    there = datetime.fromisoformat(render("{{ strftime_now('%Y-%m-%dT%H:%M:%S+00:00') }}"))
    assert abs((there - datetime.now(UTC)).total_seconds() - 9.5 * 3600) < 60


def test_render_leaves_the_messages_alone():
    chat = json.loads(json.dumps(CHATS["tools"]))
    render(QWEN, chat, TOOLS)
    render("{{ messages }}", PARTS)
    assert chat == CHATS["tools"]
    assert isinstance(PARTS[0]["content"], list)


def test_render_prefers_variables_over_special_tokens():
    assert render("{{ bos_token }}", bos_token="B") == "B"


def test_render_runs_in_several_threads_with_their_own_limits():
    results = {}

    def work(n):
        try:
            results[n] = render(
                "{% for i in range(n) %}{% for j in range(1000) %}{% endfor %}{% endfor %}ok", n=n, seconds=0.3
            )
        except InvalidArgument as error:
            results[n] = str(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 100_000, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "takes longer than 0.3 s" in results.pop(100_000)
    assert set(results.values()) == {"ok"}


def test_render_gives_waiting_threads_their_answers_when_the_process_is_ended():
    sources = {
        "hangs": BOMBS["sum of lists"],  # one call of C, which only the end of the process stops
        "fills": BOMBS["string times"],
        **{f"waits {n}": "{{ messages[0].content }}" for n in range(4)},
    }
    results = {}

    def work(name):
        try:
            results[name] = render(sources[name], seconds=0.3)
        except InvalidArgument as error:
            results[name] = str(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "takes longer than 0.3 s" in results.pop("hangs")
    assert "makes data of more than 64 MB" in results.pop("fills")
    assert list(results.values()) == ["hi"] * 4


# the process


@pytest.fixture
def fresh_child(monkeypatch):
    child = Child("penstock.text.template_child:answer", memory=template_module._MEMORY, seconds=2)
    monkeypatch.setattr(template_module, "_child", child)
    yield child
    child.close()


def test_render_uses_one_process_and_compiles_once():
    pids = []
    for source in (QWEN, GEMMA, QWEN):
        render(source)
        pids.append(template_module._child._process._child.pid)
    assert len(set(pids)) == 1 and pids[0] != os.getpid()
    assert template_child._compiled(QWEN) is template_child._compiled(QWEN)


def test_render_needs_its_process(monkeypatch, fresh_child):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChildDied, match="no process can be started: No such file"):
        render("x")


def test_render_works_after_the_process_died(fresh_child):
    fresh_child.start()
    child = fresh_child._process._child
    child.send_signal(signal.SIGSTOP)  # it has the call and does not answer
    threading.Timer(0.1, child.kill).start()
    with pytest.raises(InvalidArgument, match="^chat_template.jinja: chat template: ends the process that runs it"):
        render("x")
    assert render("x") == "x"
    child = fresh_child._process._child
    child.kill()
    child.wait()
    assert render("x") == "x"  # it ended between two calls, by no fault of either


def test_the_process_imports_little_and_its_parent_no_jinja():
    for module, absent in (("template", "jinja2"), ("template_child", "numpy")):
        code = f"import sys, penstock.text.{module}; sys.exit({absent!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_render_gives_values_as_they_are():
    values = {
        "text": "\ud800 \udc00\ud800 \ud83d\ude00 \x00\x1f\u2028\n\x7f",
        "numbers": [2**4095, -(2**4095), 1e-300, -0.0, math.inf, -math.inf, math.nan, True, None],
        "nested": {"": [[], {}, {"a b": "\N{BULLET}"}]},
    }
    want = "".join(str(values[name]) for name in values)
    assert render("{{ text }}{{ numbers }}{{ nested }}", **values) == want
    assert render(r"{{ '\N{BULLET}\u00e4\x41' }}{{ 'ab cd' | wordwrap(2) }}") == "\N{BULLET}äAab\ncd"


@pytest.mark.parametrize("letter", ["x", "東"])
def test_render_takes_as_much_text_as_it_may_get(letter):
    count = (16 << 20) // len(letter.encode()) - 200
    length = "{{ messages[0].content | length }}"
    assert render(length) == "2"  # the memory that this one may take is no limit of the next one
    assert render(length, [{"role": "user", "content": letter * count}]) == str(count)
    assert render(QWEN, [{"role": "user", "content": letter * (count // 2)}]).count(letter) == count // 2


# limits

GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(100000) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
BOMBS = {
    "nested loops": "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "condition that fails": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro forever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "output": "{% for a in range(100000) %}{{ 'x' * 100 }}{% endfor %}",
    "constant output": "{% for a in range(100000) %}" + "x" * 200 + "{% endfor %}",
    "output of a macro": "{% macro f() %}{% for a in range(99999) %}"
    + "x" * 200
    + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "output of a set block": "{% set t %}{% for a in range(99999) %}"
    + "x" * 200
    + "{% endfor %}{% endset %}{{ t|length }}",
    "string times": "{{ 'x' * 10**10 }}",
    "times string": "{{ 10**10 * 'x' }}",
    "list times": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 10 ** (10 ** 6) }}",
    "growing integer": GROW % ("3", "ns.x * ns.x"),
    "growing string": GROW % ("'ab'", "ns.x + ns.x"),
    "growing concatenation": GROW % ("'ab'", "ns.x ~ ns.x"),
    "growing list": GROW % ("[1]", "ns.x + ns.x"),
    "sharing list": GROW % ("[1]", "[ns.x, ns.x]"),
    "sharing dict": GROW % ("{'a': 1}", "{'a': ns.x, 'b': ns.x}"),
    "deep tuple": GROW % ("(1,)", "(ns.x,)"),
    "growing replace": GROW % ("'aa'", "ns.x.replace('a', ns.x)"),
    "growing replace filter": GROW % ("'aa'", "ns.x|replace('a', ns.x)"),
    "growing format": GROW % ("'ab'", "'{0}{0}{0}'.format(ns.x)"),
    "growing percent": GROW % ("'ab'", "'%(a)s%(a)s' % {'a': ns.x}"),
    "growing join": GROW % ("'ab'", "ns.x.join([ns.x, ns.x])"),
    "growing indent": GROW % ("'a\\nb'", "ns.x|indent(ns.x)"),
    "growing json": GROW % ("'\"'", "ns.x|tojson"),
    "many strings": GROW % ("[]", "ns.x + [namespace(a='x' * 8000000)]"),
    "many slices": "{% set s = 'x' * 8000000 %}" + GROW % ("[]", "ns.x + [namespace(a=s[1:])]"),
    "join filter": "{{ (['x' * 10000] * 1000) | join('y' * 10000) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill in a loop": "{% for a in [1] %}{{ 'x'.zfill(10**10) }}{% endfor %}",
    "expandtabs": "{{ '\\t'.expandtabs(10**10) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 10**10) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "indent": "{{ 'x'|indent(10**10, true) }}",
    "json indent": "{{ [1]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "round": "{{ 5|round(-10**9) }}",
    "wordwrap": "{{ ('a ' * 10000)|wordwrap(1, wrapstring='x' * 100000) }}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[])|length }}",
    "range": "{{ range(10**9)|list }}",
    "long list": "{{ ('東' * 8000000)|list|length }}",
    "split": "{{ ('a' * 8000000).split('a')|length }}",
    "chain of filters": "{{ range(100000)" + "|map('string')" * 40 + "|list|length }}",
    "date": "{{ strftime_now('%Y' * 1000) }}",
    "output of a block": "{% block b %}{% for a in range(99999) %}" + "x" * 200 + "{% endfor %}{% endblock %}",
    "output of a reference": "{% if false %}{% block b %}{% for a in range(99999) %}"
    + "x" * 200
    + "{% endfor %}{% endblock %}{% endif %}{{ self.b()|length }}",
    "block forever": "{% block b %}{{ self.b() }}{% endblock %}",
    "blocks twice": "{% block b0 %}{% endblock %}"
    + "".join(f"{{% block b{n + 1} %}}{{{{ self.b{n}() }}}}{{{{ self.b{n}() }}}}{{% endblock %}}" for n in range(25)),
    "growing block": GROW % ("''", "ns.x") + "{% block b %}" + GROW % ("'ab'", "ns.x + ns.x") + "{% endblock %}",
}


SLOW = (
    "nested loops",
    "condition that fails",
    "macro twice",
    "growing integer",
    "slice",
    "round",
    "sum of lists",
    "chain of filters",
    "blocks twice",
)
REFUSED = {  # by Python's own limits
    "power": "ValueError: Exceeds the limit",
    "expandtabs": "OverflowError: Python int too large",
    "range": "OverflowError: Range too big",
}


@pytest.mark.parametrize("name", BOMBS)
def test_render_stops_a_bomb(name):
    reason = "takes longer than" if name in SLOW else REFUSED.get(name, "(makes|nests|asks for)")
    templates = ChatTemplates({"default": (BOMBS[name], "chat_template.jinja")})
    templates.compile()
    templates.max_seconds = 0.15 if name in SLOW else 10
    started = time.monotonic()
    with pytest.raises(InvalidArgument, match=rf"^chat_template\.jinja: chat template(, line 1)?: {reason}"):
        templates.render(HI)
    assert time.monotonic() - started < 3


def test_render_does_not_join_what_is_too_long():
    body = "{% for a in range(500) %}" + "x" * 200_000 + "{% endfor %}"
    with pytest.raises(InvalidArgument, match="makes a text of"):  # not: data of more than 64 MB
        render("{% macro f() %}" + body + "{% endmacro %}{{ f() }}")


def test_render_limits_how_deep_macros_nest():
    source = "{% macro f(n) %}{{ f(n - 1) if n }}{% endmacro %}{{ f(depth) }}done"
    assert render(source, depth=90) == "done"
    with pytest.raises(InvalidArgument, match="line 1: nests calls or data too deeply, expected fewer levels"):
        render(source, depth=1000)


def test_render_stops_at_the_output_limit_and_not_before():
    templates = ChatTemplates({"default": ("{{ 'x' * n }}{{ 'y' * n }}", "t")}, max_characters=1000)
    assert len(templates.render(HI, variables={"n": 500})) == 1000
    with pytest.raises(InvalidArgument, match="makes a text of 1002 characters, expected at most 1000"):
        templates.render(HI, variables={"n": 501})


def test_render_takes_a_long_chat():
    chat = [message for _ in range(400) for message in CHATS["tools"]]
    text = render(QWEN, chat, TOOLS)
    assert text.count("<|im_start|>") == 2 + 400 * 4
    accumulating = (
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l|length }}"
    )
    assert render(accumulating, chat) == "2000"


# the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ messages.__class__ ~ 'x' }}",
        "{{ messages['__class__']['__base__'] }}",
        "{{ (''|attr('__class__'))|string }}",
        "{{ messages|map(attribute='__class__')|list|first|string }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
        "{{ ('{0.__class__.__mro__}'|safe).format('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m._func }}",
        "{% for a in [1] %}{{ loop.__class__ }}{% endfor %}",
        "{{ (messages|map(attribute='role')).gi_frame }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.encode() }}",
        "{{ (1).to_bytes(4, 'big') }}",
        "{{ ''.join.__self__ }}",
        "{{ dict.mro() }}",
        "{{ (['x']|map(attribute='encode')|first)() }}",
        "{{ namespace({'__class__': 1}).__class__ }}",
    ],
)
def test_render_keeps_python_from_templates(source):
    with pytest.raises(CheckpointError, match=r"^chat_template\.jinja: chat template, line 1: .*(kept from|without _)"):
        render(source)


@pytest.mark.parametrize(
    "source, message",
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ x", "line 1: "),
        ("{% for a in b %}", "line 1: "),
        ("{{ 'x'|frobnicate }}", "line 1: No filter named 'frobnicate'"),
        ("{{ 'x'|pprint }}", "line 1: No filter named 'pprint'"),
        ("\n{% include '/etc/passwd' %}", "line 2: include is used, expected a template in one file"),
        ("{% import 'x' as y %}", "line 1: import is used"),
        ("{% from 'x' import y %}", "line 1: fromimport is used"),
        ("{% extends 'x' %}", "line 1: extends is used"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled: RecursionError"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "cannot be compiled: SyntaxError"),
        ("{{ " + "9" * 6000 + " }}", "cannot be compiled: ValueError"),
        ("x" * 300_000, "has 300000 characters, expected at most"),
    ],
    ids=lambda text: text[:20],
)
def test_render_names_the_file_of_a_broken_template(source, message):
    with pytest.raises(CheckpointError, match=rf"^chat_template\.jinja: chat template,? {re.escape(message)}"):
        render(source)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "^chat template: roles must alternate$"),
        ("{{ raise_exception('two\\nlines') }}", "^chat template: two lines$"),
        ("{{ raise_exception() }}", "^chat template: $"),
        ("a\n\n{{ x.y.z }}", "^chat_template.jinja: chat template, line 3: 'x' is undefined"),
        ("{{ messages[0].content + 1 }}", "line 1: TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "line 1: ZeroDivisionError"),
        ("{{ messages[9].content }}", "line 1: .*has no element 9"),
        ("{{ lipsum(5) }}", "'lipsum' is undefined"),
        ("{{ messages() }}", "line 1: TypeError: 'list' object is not callable"),
        ("{% set x.y = 1 %}", "line 1: "),
    ],
)
def test_render_turns_what_a_template_raises_into_one_line(source, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_render_can_be_used_after_an_error():
    templates = ChatTemplates({"default": ("{{ raise_exception('no') if no }}yes", "t")})
    with pytest.raises(InvalidArgument):
        templates.render(HI, variables={"no": True})
    assert templates.render(HI) == "yes"


# messages


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ("hi", DTypeError, "^messages is a str, expected a list"),
        ({"role": "user"}, DTypeError, "^messages is a dict, expected a list"),
        (None, DTypeError, "^messages is a NoneType"),
        ([], InvalidArgument, "^messages is empty"),
        (["hi"], DTypeError, r"^messages\[0\] is a str, expected a dict"),
        ([{"content": "x"}], InvalidArgument, r"^messages\[0\].role is missing, expected a string"),
        ([{"role": ""}], InvalidArgument, r"^messages\[0\].role is empty"),
        ([*HI, {"role": 5}], InvalidArgument, r"^messages\[1\].role is a int"),
        (
            [{"role": "user", "content": 5}],
            InvalidArgument,
            r"^messages\[0\].content is a int, expected a string, a list",
        ),
        ([{"role": "user", "content": {"a": 1}}], InvalidArgument, r"^messages\[0\].content is a dict"),
        ([{"role": "user", "content": ["x"]}], InvalidArgument, r"^messages\[0\].content\[0\] has no type"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
                }
            ],
            InvalidArgument,
            r"^messages\[0\].content\[1\] has type 'image_url', expected text: images and sound are not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidArgument, r"content\[0\].text is a NoneType"),
        ([{"role": "user", "name": object()}], InvalidArgument, r"^messages\[0\].name is a object, expected JSON data"),
        ([{"role": "user", 3: 1}], InvalidArgument, r"^messages\[0\] has the key 3, expected strings"),
        ([{"role": "user", "x": 2**5000}], InvalidArgument, r"^messages\[0\].x is an integer of 5001 bits"),
        ([{"role": "user", "x": print}], InvalidArgument, r"^messages\[0\].x is a builtin_function_or_method"),
        ([{"role": "user", "content": "x" * (17 << 20)}], InvalidArgument, "^chat template: messages holds too much"),
    ],
)
def test_render_refuses_messages(messages, error, message):
    templates = ChatTemplates({"default": ("x", "t")})
    with pytest.raises(error, match=message):
        templates.render(messages)


def test_render_refuses_data_that_holds_itself():
    loop: list = []
    loop.append(loop)
    with pytest.raises(InvalidArgument, match=r"^messages\[0\].x.* is nested deeper than 90 levels"):
        render("x", [{"role": "user", "x": loop}])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"tools": {"a": 1}}, DTypeError, "^tools is a dict, expected a list"),
        ({"tools": [print]}, DTypeError, r"^tools\[0\] is a builtin"),
        ({"add_generation_prompt": 1}, DTypeError, "^chat template: add_generation_prompt is 1, expected a bool"),
        ({"variables": {"messages": []}}, InvalidArgument, "^chat template: messages is among the variables"),
        ({"variables": {"tools": []}}, InvalidArgument, "^chat template: tools is among the variables"),
        ({"variables": {"x": print}}, InvalidArgument, "^x is a builtin_function_or_method, expected JSON data"),
    ],
)
def test_render_refuses_other_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ChatTemplates({"default": ("x", "t")}).render(HI, **arguments)


def test_render_takes_messages_without_content():
    assert (
        render(
            "{{ messages[0].content is none }}{{ messages[1].content is defined }}",
            [{"role": "assistant", "content": None}, {"role": "assistant"}],
        )
        == "TrueFalse"
    )


# files


def test_templates_in_finds_them_in_order(tmp_path):
    assert templates_in(tmp_path, {}, {}) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert templates_in(tmp_path, {}, {}).render(HI) == "from json"
    settings = {"chat_template": "from config"}
    assert templates_in(tmp_path, settings, {}).render(HI) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from jinja ä")
    assert templates_in(tmp_path, settings, {}).render(HI) == "from jinja ä"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    templates = templates_in(tmp_path, settings, {})
    assert [templates.render(HI), templates.render(HI, TOOLS), templates.render(HI, [])] == [
        "from jinja ä",
        "with tools",
        "with tools",
    ]


def test_templates_in_takes_named_templates(tmp_path):
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }} tools"}]
    templates = templates_in(tmp_path, {"chat_template": listed}, {})
    assert (templates.render(HI), templates.render(HI, TOOLS)) == ("plain", "1 tools")
    only = templates_in(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]}, {})
    with pytest.raises(
        InvalidArgument, match="^chat template: the model has templates named rag, expected one named default"
    ):
        only.render(HI)


@pytest.mark.parametrize("value", [5, {"default": "x"}, [{"name": "default"}], ["x"], [{"name": 1, "template": "x"}]])
def test_templates_in_refuses_what_is_no_template(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template is a \w+, expected a string or"):
        templates_in(tmp_path, {"chat_template": value}, {})


def test_templates_in_refuses_files_that_are_no_text(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: byte 0 is not UTF-8"):
        templates_in(tmp_path, {}, {})
    path.write_bytes(b"x" * (2 << 20))
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: has 2097152 bytes, expected at most"):
        templates_in(tmp_path, {}, {})
    path.unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template.json: is damaged"):
        templates_in(tmp_path, {}, {})


def test_special_tokens_are_strings_or_objects_with_content():
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "pad_token": None,
        "add_bos_token": True,
        "image_token": "<img>",
        "model_max_length": 5,
        "extra_special_tokens": {"audio_token": "<aud>"},
    }
    found = special_tokens(config, {"bos_token": "other", "pad_token": {"content": "<pad>"}})
    assert found == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "image_token": "<img>",
        "audio_token": "<aud>",
    }
