"""Chat templates of the common kinds, and chats in short hand."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
"""
# Prints its own begin token and trims, as Llama 3 does.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Alternating roles without a system role, as Gemma and early Mistral have it.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else ' ' + m['content'] + eos_token }}"
    "{% endfor %}"
)
# Takes the reasoning out of every answer but the last and prints an empty one there, as Qwen 3 does.
THINKING = (
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set thought = thought if '</think>' in m.content else '\n\n' %}"
    "{{ '<think>' + thought + '</think>\n\n' + text }}"
    "{% else %}{{ text }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Prints the end-of-text token after a chat that does not go on, as Phi 3 does.
END_AT_END = (
    "{% for m in messages %}{{ '<|head|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Prints a channel after the generation prompt, and another end token after the last answer, as GPT-OSS does.
CHANNELS = (
    "{% for m in messages %}{{ '<|head|>' + m.role }}{{ '<|/head|>final:' if m.role == 'assistant' else ':' }}"
    "{{ m.content }}{{ eos_token if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant' }}{% endif %}"
)
# Prints the header of a further answer after every chat, as Llama 3 did at first.
ALWAYS_PROMPTS = (
    "{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|head|>assistant<|/head|>' }}"
)
# Has no end token: a line end is all that follows an answer.
LINES = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"


def chat(*turns, **keys):
    """A messages row from "U text", "A text", "S text", "T text"."""
    roles = {"U": "user", "A": "assistant", "S": "system", "T": "tool"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns], **keys}
