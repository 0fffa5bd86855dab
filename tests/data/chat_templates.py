"""Chat templates in the styles of hub model families, and chats to test them with."""

# Hub templates have long lines.
# ruff: noqa: E501

CALL = {
    "type": "function",
    "function": {"name": "look_up", "arguments": {"b": "it's <b> & 日本", "a": [1, 2.5, None]}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word in a <book> & its 'index'.",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
MORE = [{"role": "user", "content": " And 日本?"}, {"role": "assistant", "content": "Tōkyō.\n"}]
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "look_up", "content": '{"found": "a <b>"}'}
THINKING = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3 make 5."}

CHATS = {
    "plain": {"messages": [ASK, ANSWER]},
    "system": {"messages": [SYSTEM, ASK, ANSWER]},
    "several turns": {"messages": [SYSTEM, ASK, ANSWER, *MORE]},
    "tool call": {"messages": [ASK, CALLING], "tools": [TOOL]},
    "tool result": {"messages": [SYSTEM, ASK, CALLING, RESULT, ANSWER], "tools": [TOOL]},
    "thinking": {"messages": [ASK, THINKING]},
    "thinking, then more": {"messages": [ASK, THINKING, *MORE]},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, ASK, ANSWER]},
    "documents": {"messages": [ASK, ANSWER], "documents": [{"title": "T", "text": "é"}]},
}

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def chatml(body: str = "{{ m.content }}", before: str = "", head: str = "{{ m.role }}") -> str:
    """Renders turns between `<|im_start|>` and `<|im_end|>`."""
    return (
        before + "{% for m in messages %}{{ '<|im_start|>' }}" + head + "{{ '\\n' }}" + body
        + "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )  # fmt: skip


CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}"
)
LISTED_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}"
    "{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
)
GENERATED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + CALLS + "{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ '<|im_end|>' }}{% endif %}"
)

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Year: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and not message.content is string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

INSTRUCTIONS = """{{ bos_token }}{% set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{{ '[INST] ' + (ns.system if loop.last or loop.index0 < 2 else '') + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls is defined %}{{ '[TOOL_CALLS] ' }}{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant, system and tool roles are supported!') }}
{%- endif %}{% endfor %}"""

ALTERNATING = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

THINKS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- call.name }}
            {{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

BEGINS_OF_SENTENCE = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}{% set content = message['content'] %}{% if content and '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<｜Assistant｜>' + (content or '') }}{% for tool in message.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] | tojson + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ eos_token }}{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% elif message['role'] == 'tool' %}{{ '<｜tool▁output｜>' + message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

TEMPLATES = {
    "chatml": chatml(),
    "chatml, default system": chatml(
        before="{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    ),
    "chatml, calls": chatml("{{ m.content }}" + CALLS, LISTED_TOOLS),
    "chatml, calls in a sum": chatml(
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<c>' + (c | tojson) + '</c>' }}{% endfor %}",
        LISTED_TOOLS,
    ),
    "chatml, ascii": chatml("{{ m.content | tojson(ensure_ascii=True) }}"),
    "chatml, sorted keys": chatml("{{ m | tojson(sort_keys=True) }}"),
    "chatml, separators": chatml("{{ m | tojson(separators=(',', ':')) }}"),
    "chatml, indented tools": chatml(
        "{{ m.content }}", "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    ),
    "chatml, tools not none": chatml(
        "{{ m.content }}", "{% if tools is not none %}You may call.\n{% endif %}"
    ),
    "chatml, documents": chatml(
        "{{ m.content }}",
        "{% if documents is not none %}{% for d in documents %}{{ d.title ~ d.text }}{% endfor %}{% endif %}",
    ),
    "chatml, generation": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    + GENERATED
    + "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "generation, trimmed": "{{ bos_token }}{%- for m in messages -%}\n{%- if m.role == 'assistant' -%}\n"
    "  A:{% generation %} {{ m.content | trim }}{{ eos_token }}{%- endgeneration -%}\n"
    "{%- else -%}\n  {{ m.role }}: {{ m.content }}\n{%- endif -%}\n{%- endfor -%}",
    "headers": HEADERS,
    "instructions": INSTRUCTIONS,
    "alternating": ALTERNATING,
    "thinks": THINKS,
    "sentences": BEGINS_OF_SENTENCE,
    "bars": "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + '<|end|>' + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "end of text": "{{ eos_token }}{% for message in messages %}\n{% if message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + '\\n' }}\n{% elif message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + '\\n' }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n' + message['content'] + (eos_token if loop.last else eos_token + '\\n') }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>\\n' }}\n{% endif %}\n"
    "{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'developer' %}{% continue %}{% endif %}"
    "{% if loop.index > 4 %}{% break %}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "items": "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}",
    "macro": "{% macro turn(m) %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
    "replaces": chatml("{{ m.content.replace('<', '&lt;') | upper }}"),
    "undefined": "{{ sep_token }}{% for m in messages %}{{ m.role }}{{ m.nothing }}{{ m.content }}{% endfor %}",
    "year": "{{ strftime_now('%Y') }}{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}",
    "immutable": "{% set _ = messages.append({'role': 'user', 'content': 'x'}) %}{{ messages | length }}",
    "refuses": "{{ raise_exception('never') }}",
}

TEMPLATES_OF_RECORDS = {
    "first system only": "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n"
    "{% endif %}{% for m in messages if m.role != 'system' %}{{ m.role }}> {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "first call only": "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "reasons": "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content is defined %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}</>{% endfor %}",
    "prose": "{# no reasoning_content, no thinking: #}tools and documents, thinking:\n"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ 'no thinking' }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "last turns": "{% for m in messages[-4:] %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
}
"""Templates that drop a part of some records; such records must raise."""
