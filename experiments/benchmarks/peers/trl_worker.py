"""TRL: the generation and the steps of a real GRPOTrainer with a peft LoRA, on the models of transformers.

The trainer's own loop runs; between its steps a callback waits for the next command, so that nothing runs while others are measured.
"""

import os
import sys
import tempfile

import protocol

channel, job = protocol.Channel(), protocol.read_job()
os.environ |= {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(job["threads"])


class Trainer(GRPOTrainer):
    """Notes how long a step's generation took."""

    def _generate_single_turn(self, *args, **kwargs):
        clock = protocol.Clock()
        out = super()._generate_single_turn(*args, **kwargs)
        self.generation = clock.read() | {"tokens": sum(map(len, out[0]))}
        return out


class Commands(transformers.TrainerCallback):
    """Before a step: answers commands until one asks for the step. After it: says what the step took."""

    trainer: Trainer
    waited = False  # the first steps warm up

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= job["warm_up"]:
            if not self.waited:
                channel.answer(ready=about(self.trainer))
                self.waited = True
            while (command := channel.read()) is not None and command["do"] != "step":
                channel.answer(**{"rollout": rollout, "check": check}[command["do"]](self.trainer))
            if command is None:
                sys.exit(0)
        self.clock = protocol.Clock()

    def on_step_end(self, args, state, control, **kwargs):
        if self.waited:
            rolled_out = self.trainer.generation
            channel.answer(**self.clock.read(), tokens=rolled_out["tokens"], rollout_seconds=rolled_out["seconds"])


def rollout(trainer: Trainer) -> dict:
    prompts = [ids for ids in job["prompts"] for _ in range(job["group"])]
    trainer._generate_single_turn(prompts, None, {}, job["group"])
    return trainer.generation


@torch.no_grad()
def check(trainer: Trainer) -> dict:
    """Logprobs that the base gives the probed tokens after each prompt."""
    model, found = trainer.accelerator.unwrap_model(trainer.model), []
    model.eval()
    with model.disable_adapter():
        for ids, probe in zip(job["prompts"], job["probe"]):
            found.append(torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)[probe].tolist())
    model.train()
    return {"logprobs": found}


def about(trainer: Trainer) -> dict:
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {
        "versions": protocol.versions("trl", "peft", "transformers", "torch"),
        "threads": torch.get_num_threads(),
        "dtype": str(trainer.model.dtype).removeprefix("torch."),
        "adapter": f"peft LoRA, {trained:,} parameters",
        "experts": trainer.model.config._experts_implementation,
    }


def lora(model) -> LoraConfig:
    """Ranks and alpha of ours. Fused gate and up are one matrix to peft, with one pair of this rank: fewer numbers than our two."""
    sparse = any("mlp.experts." in name for name, _ in model.named_parameters())
    return LoraConfig(
        r=job["rank"],
        lora_alpha=job["alpha"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"] + ([] if sparse else ["gate_proj", "up_proj", "down_proj"]),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if sparse else None,
        init_lora_weights=False,  # random B, as on our side: what is added must not be nothing
    )


def main():
    rows = len(job["prompts"]) * job["group"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["weights"], dtype=getattr(torch, job["dtype"]), experts_implementation=job["experts"]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["weights"])
    if tokenizer(text=job["texts"])["input_ids"] != job["prompts"]:
        raise ValueError("the tokenizer gives other ids than ours")
    endless = model.config.vocab_size  # no token's id: completions run to their full length
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            directory,
            use_cpu=True,
            bf16=False,
            max_steps=1_000_000,
            per_device_train_batch_size=rows // job["accumulate"],
            gradient_accumulation_steps=job["accumulate"],
            num_generations=job["group"],
            max_completion_length=job["new_tokens"],
            generation_kwargs={"eos_token_id": endless},
            gradient_checkpointing=False,  # ours does not recompute either
            beta=0.0,
            loss_type="grpo",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            shuffle_dataset=False,
            logging_steps=1_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        commands = Commands()
        commands.trainer = trainer = Trainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(any(c.isdigit() for c in text)) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": job["texts"] * 64}),
            processing_class=tokenizer,
            callbacks=[commands],
            peft_config=lora(model),
        )
        trainer.eos_token_ids = [endless]
        trainer.train()


main()
