"""Chat templates in the styles of well-known models, and tokenizers that know their special tokens."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- (message.content if message.content is string else message.content | tojson) + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Thinking is shown only in turns after the last question.
QWEN3 = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = m.reasoning_content | default('') %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {%- generation %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Ends the last turn and earlier turns with different tokens; a tool message needs the call before it.
HARMONY = """\
{%- set ns = namespace(call=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {%- set ns.call = call.name %}
        {%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{ '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.last and m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
        {%- set ns.call = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.call is none %}{{ raise_exception('Message has tool role, but no call before it') }}{% endif %}
        {{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# Checks that roles alternate; the system prompt moves into the last question.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m.role in ('user', 'assistant') and (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# Ends no turn: the header of the next message is what stops the model.
GLM4 = """\
{{- '[gMASK]' }}
{%- for m in messages %}
{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# Wraps what is said in a turn, and takes text as parts too.
WRAPPED = """\
{%- for m in messages %}
{{- '<|turn|>' + m.role + '<|say|>' }}
{{- m.content if m.content is string else m.content | map(attribute='text') | join }}{{ '<|said|><|over|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant<|say|>' }}{% endif %}"""

# name: template, special tokens of the vocabulary, those of them that stop, what templates get
STYLES = {
    "wrapped": (WRAPPED, ["<|turn|>", "<|say|>", "<|said|>", "<|over|>"], ["<|over|>"]),
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<|im_end|>", "<|endoftext|>"]),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<|im_end|>", "<|endoftext|>"]),
    "harmony": (
        HARMONY,
        ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
        ["<|return|>", "<|call|>"],
    ),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], ["</s>"]),
    "glm4": (
        GLM4,
        ["<|endoftext|>", "[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
}
BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>"}

TEXT = [
    "the answer is four because two and two are four",
    "think about what the user said and answer the question",
    "user assistant system",
]


def backend(style: str) -> tokenizers.Tokenizer:
    """A byte-level BPE with a few merges, and the special tokens of a style."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=STYLES[style][1], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made
