"""A tiny random target with a byte-level tokenizer, saved as an ordinary model folder. No downloads."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 320
HIDDEN = 64


def tiny_config(**changes: Any) -> LlamaConfig:
    """Eight layers, grouped-query attention, widths that divide into blocks of 16 and 32."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "initializer_range": 0.2,  # peaked distributions: greedy choices that rounding does not flip
    }
    return LlamaConfig(**{**settings, **changes})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])  # 256, 257, 258
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write model and tokenizer to ``folder`` and return it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes))
    model.generation_config.eos_token_id = 258
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
