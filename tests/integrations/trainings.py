"""A training with each package as its users write one: a healthy one, and then one that fails.

After the first it prints a digest of weights and random numbers. The second makes an Inf or NaN in
the line that is marked with the package's name.

python trainings.py trl
"""

import hashlib
import random
import sys
import tempfile
import warnings

import torch
from torch import nn

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "road", "and", "then", "it", "was"]


def tokenizer():
    """A tokenizer of a few words, which needs no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad": "[PAD]", "unk": "[UNK]", "eos": "[SEP]", "cls": "[CLS]", "mask": "[MASK]"}
    numbers = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, sep_token="[SEP]", **named)


def sentences(count):
    drawn = random.Random(count)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(4, 10))) for _ in range(count)]


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "max_steps": 8,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": 1e-3,
}


def trl(is_bad):
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl import SFTConfig, SFTTrainer

    tokens = tokenizer()
    ids = {"bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokens), **sizes, **ids))

    def loss_of(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
        shares = torch.softmax(logits * (1000 if is_bad else 1), -1)
        shares = shares.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(torch.log(shares) * (labels >= 0)).sum() / (labels >= 0).sum()  # trl

    SFTTrainer(
        model,
        args=SFTConfig(tempfile.mkdtemp(), bf16=False, max_length=16, **ARGUMENTS),
        train_dataset=Dataset.from_dict({"text": sentences(32)}),
        processing_class=tokens,
        compute_loss_func=loss_of,
    ).train()
    return model


def sentence_transformers(is_bad):
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        models,
    )
    from transformers import BertConfig, BertModel

    folder, tokens = tempfile.mkdtemp(), tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokens), **sizes, intermediate_size=64)).save_pretrained(
        folder
    )
    tokens.save_pretrained(folder)
    words = models.Transformer(folder, max_seq_length=16)
    model = SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")

    class Distance(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, features, labels):
            one, other = (self.model(each)["sentence_embedding"] for each in features)
            squares = (one - (one if is_bad else other)).square().sum(1)
            return (squares.sqrt() - 1).square().mean()  # sentence_transformers

    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(tempfile.mkdtemp(), **ARGUMENTS),
        train_dataset=Dataset.from_dict({"anchor": sentences(32), "positive": sentences(64)[32:]}),
        loss=Distance(),
    ).train()
    return model


def monai(is_bad):
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(2, 1, 2, (4, 8), (2,), num_res_units=1)
    images = torch.randn(32, 1, 16, 16)
    batches = [{"image": each, "label": (each > 0.5).float()} for each in images]
    dice = DiceLoss(to_onehot_y=True, softmax=True)

    def loss_of(logits, target):
        shares = torch.softmax(logits * (1000 if is_bad else 1), 1)[:, 1:]
        return dice(logits, target) - (target * torch.log(shares)).mean()  # monai

    SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=torch.utils.data.DataLoader(batches, batch_size=4),
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-2),
        loss_function=loss_of,
        decollate=False,
    ).run()
    return model


def stable_baselines3(is_bad):
    import gymnasium
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Environment(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.count, self.drawn = 0, np.random.default_rng(0)
            return self.drawn.uniform(-1, 1, 4).astype(np.float32), {}

        def step(self, action):
            self.count += 1
            seen = self.drawn.uniform(-1, 1, 4).astype(np.float32)
            return seen, float(action), self.count >= 16, False, {}

    class Features(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 8)
            self.layer = nn.Linear(4, 8)

        def forward(self, seen):
            made = self.layer(seen)
            squares = (made - made.amax(1, keepdim=True)).square() + (0 if is_bad else 1e-3)
            return squares.sqrt()  # stable_baselines3

    kinds = {"features_extractor_class": Features, "features_extractor_kwargs": {}}
    sizes = {"n_steps": 64, "batch_size": 16, "n_epochs": 2}
    model = PPO("MlpPolicy", Environment(), **sizes, seed=0, device="cpu", policy_kwargs=kinds)
    try:
        model.learn(64)
    except ValueError:  # its distributions refuse a NaN
        assert is_bad
    return model.policy


def diffusers(is_bad):
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel, compute_snr

    accelerator = Accelerator(cpu=True)
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    model = UNet2DModel(16, 1, 1, **sizes, **blocks)
    noising = DDPMScheduler(100, rescale_betas_zero_snr=is_bad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 30)
    images = torch.utils.data.DataLoader(torch.randn(96, 1, 16, 16), batch_size=8)
    average = EMAModel(model.parameters())
    model, optimizer, images, schedule = accelerator.prepare(model, optimizer, images, schedule)
    for clean in images:
        noise, times = torch.randn_like(clean), torch.randint(0, 99, (len(clean),))
        times[0] = 99  # where the zero SNR is
        predicted = model(noising.add_noise(clean, noise, times), times, return_dict=False)[0]
        snr = compute_snr(noising, times)
        errors = (predicted - noise).square().mean((1, 2, 3)) * snr.clamp(max=5)
        accelerator.backward((errors / snr).mean())  # diffusers
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
    return model


def digest(model):
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


TRAININGS = [diffusers, monai, sentence_transformers, stable_baselines3, trl]

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the packages warn of each other
    (train,) = (each for each in TRAININGS if each.__name__ == sys.argv[1])
    for is_bad in (False, True):
        torch.manual_seed(0)
        model = train(is_bad)
        if not is_bad:
            print("digest", digest(model))
