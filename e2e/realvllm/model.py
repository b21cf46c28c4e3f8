"""Makes what a real engine needs to run here without a download: a tiny random
model, its tokenizer and two LoRA adapters.

    python model.py FOLDER [llama|gemma3]
"""
import json
import os
import pathlib
import sys

VOCABULARY = 4000
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 2, 1, 32

CHAT = (
    "{% if tools %}<s>tools\n{{ tools | tojson }}</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def text():
    """English enough to train a tokenizer on: the standard library's sources."""
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:120]:
        yield path.read_text(encoding="utf-8", errors="replace")


def tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        text(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def config(kind):
    common = dict(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        torch_dtype="bfloat16",
    )
    if kind == "llama":
        return dict(common, architectures=["LlamaForCausalLM"], model_type="llama",
                    num_hidden_layers=LAYERS, hidden_act="silu")
    if kind == "gemma3":
        return dict(common, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text",
                    num_hidden_layers=4, hidden_activation="gelu_pytorch_tanh",
                    sliding_window=128, query_pre_attn_scalar=HEAD_DIM,
                    layer_types=["sliding_attention", "full_attention"] * 2)
    raise SystemExit(f"unknown model kind {kind!r}: llama or gemma3")


def adapter(folder, seed):
    import torch
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[at + ".lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            weights[at + ".lora_B.weight"] = torch.randn(out, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=16, bias="none",
        target_modules=["q_proj", "v_proj"], base_model_name_or_path="tiny")))


def main():
    folder = pathlib.Path(sys.argv[1])
    kind = sys.argv[2] if len(sys.argv) > 2 else "llama"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(kind), indent=1))
    tokenizer(folder)
    if kind == "llama":
        adapter(folder / "ad1", 1)
        adapter(folder / "ad2", 2)
    # The folder's last file says that it is whole.
    (folder / "complete").touch()


main()
