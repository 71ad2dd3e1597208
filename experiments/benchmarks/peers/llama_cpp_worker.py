"""llama.cpp: the GGUF file itself, without an adapter. All completions of a round decode as one batch; a group shares its prompt's keys."""

import ctypes

import protocol

channel, job = protocol.Channel(), protocol.read_job()

import llama_cpp as ll  # noqa: E402
import numpy as np  # noqa: E402

rows = len(job["prompts"]) * job["group"]
prompt_tokens = sum(map(len, job["prompts"]))
ll.llama_backend_init()
model = ll.llama_model_load_from_file(job["gguf"].encode(), ll.llama_model_default_params())
settings = ll.llama_context_default_params()
settings.n_ctx = -(-(prompt_tokens + rows * job["new_tokens"]) // 256) * 256
settings.n_batch = settings.n_ubatch = max(prompt_tokens, rows)
settings.n_seq_max = rows
settings.kv_unified = True
settings.n_threads = settings.n_threads_batch = job["threads"]
context = ll.llama_init_from_model(model, settings)
memory, vocab = ll.llama_get_memory(context), ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
batch = ll.llama_batch_init(settings.n_batch, 0, 1)


def decode(entries: list[tuple[int, int, int, bool]]) -> np.ndarray:
    """Runs (token, position, sequence, whether its logits are wanted); logits [wanted, V], until the next call."""
    wanted = 0
    for i, (token, position, sequence, want) in enumerate(entries):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, position, 1, sequence, want
        wanted += want
    batch.n_tokens = len(entries)
    if status := ll.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode: {status}")
    pointer = ctypes.cast(ll.llama_get_logits(context), ctypes.POINTER(ctypes.c_float * (wanted * vocab)))
    return np.frombuffer(pointer.contents, np.float32).reshape(wanted, vocab)


def prefill() -> np.ndarray:
    """Every prompt in the sequence of its first completion: logits [P, V] after their last tokens."""
    ll.llama_memory_clear(memory, True)
    return decode([(t, i, p * job["group"], i == len(ids) - 1) for p, ids in enumerate(job["prompts"]) for i, t in enumerate(ids)])


def generate() -> int:
    """Greedy: drawing at a temperature would cost it more."""
    group, now = job["group"], prefill().argmax(-1)
    for p in range(len(job["prompts"])):
        for g in range(1, group):
            ll.llama_memory_seq_cp(memory, p * group, p * group + g, -1, -1)
    now, made = np.repeat(now, group), rows
    for t in range(job["new_tokens"] - 1):
        now = decode([(int(now[r]), len(job["prompts"][r // group]) + t, r, True) for r in range(rows)]).argmax(-1)
        made += len(now)
    return made


def check() -> dict:
    """Logprobs that the base gives the probed tokens after each prompt."""
    z = prefill().astype(np.float64)
    logprobs = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
    return {"logprobs": [row[probe].tolist() for row, probe in zip(logprobs, job["probe"])]}


for _ in range(job["warm_up"]):
    generate()
about = {
    "versions": protocol.versions("llama-cpp-python"),
    "system": ll.llama_print_system_info().decode().strip(),
    "threads": job["threads"],
    "dtype": "the file's Q4_1",
    "adapter": "none",
}
protocol.serve(channel, about, {"rollout": lambda: protocol.timed(generate), "check": check})
