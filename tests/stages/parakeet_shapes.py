"""The shapes of Parakeet's four example experiments, on tiny data: each reads, trains, validates and reports as its example does.

They are written for any ExperimentBase, ours or Parakeet's own; ``test_parakeet.py`` says how the figures of the latter were
made. What a model computes is of our own and small; what stands around it is as in the examples.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Sampler


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Figure:
    """What a plot stands for here: an image of the sum of a tensor, by a ``savefig`` of its own."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def savefig(self, file: Any, **options: str) -> None:
        file.write(f"{options['format']} {self.values.sum().item():.6f}".encode())


class Speakers(Sampler[list[Any]]):
    """Batches of some speakers with two utterances of each, without end; drawn from Python's generator, as in ge2e."""

    def __iter__(self) -> Iterator[list[Any]]:
        speakers: list[int] = []
        while True:
            batch = []
            for _ in range(3):
                if not speakers:
                    speakers = list(range(5))
                    random.shuffle(speakers)
                speaker = speakers.pop()
                batch += [(speaker, utterance) for utterance in random.sample(range(4), 2)]
            yield batch


class Utterances:
    """(speaker, utterance) -> frames [12, 4]."""

    def __getitem__(self, place: tuple[int, int]) -> Tensor:
        return noise(12, 4, seed=10 * place[0] + place[1]) + place[0]


def clips(utterances: list[Tensor]) -> Tensor:
    """A random clip of each, [batch, 8, 4]."""
    starts = [random.randint(0, 4) for _ in utterances]
    return torch.stack([frames[start : start + 8] for frames, start in zip(utterances, starts, strict=True)])


class SpeakerEncoder(nn.Module):
    """The similarity of each utterance with the mean of each speaker, and the loss of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)
        self.similarity_weight, self.similarity_bias = (
            nn.Parameter(torch.tensor(10.0)),
            nn.Parameter(torch.tensor(-5.0)),
        )

    def forward(self, specs: Tensor, speakers: int) -> tuple[Tensor, float]:
        embeds = nn.functional.normalize(self.linear(self.lstm(specs)[1][0][-1]).relu(), dim=-1)
        means = nn.functional.normalize(embeds.reshape(speakers, -1, 5).mean(1), dim=-1)
        scores = embeds @ means.T * self.similarity_weight + self.similarity_bias
        target = torch.arange(speakers).repeat_interleave(len(specs) // speakers)
        return nn.functional.cross_entropy(scores, target), (scores.argmax(-1) != target).double().mean().item()

    def do_gradient_ops(self) -> None:
        for parameter in (self.similarity_weight, self.similarity_bias):
            parameter.grad *= 0.01


class Sentences:
    """Texts [6], tones [6], frames [6, 3], a voice [2] of each."""

    def __init__(self, count: int, seed: int) -> None:
        self.texts = torch.randint(1, 9, (count, 6), generator=torch.Generator().manual_seed(seed))
        self.mels, self.voices = noise(count, 6, 3, seed=seed), noise(count, 2, seed=seed + 1)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.texts[index], self.texts[index] % 4, self.mels[index], self.voices[index]


class Tacotron(nn.Module):
    """Frames before and after a postnet, and where it looks; with dropout."""

    def __init__(self, voices: bool) -> None:
        super().__init__()
        self.texts, self.tones, self.voice = nn.Embedding(9, 8), nn.Embedding(4, 8), nn.Linear(2, 8) if voices else None
        self.drop, self.gru, self.mel = nn.Dropout(0.5), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
        self.postnet = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))

    def forward(self, texts: Tensor, tones: Tensor | None = None, global_condition: Tensor | None = None) -> Any:
        encoded = self.texts(texts)
        if self.voice:
            encoded = encoded + self.tones(tones) + self.voice(global_condition)[:, None]
        decoded = self.gru(self.drop(encoded))[0]
        alignments = (decoded @ encoded.transpose(1, 2)).softmax(-1)
        mel = self.mel(alignments @ encoded + decoded)
        return {"mel_output": mel, "mel_outputs_postnet": mel + self.postnet(mel), "alignments": alignments}


def tacotron_losses(outputs: Any, mels: Tensor) -> dict[str, Tensor]:
    names = {"mel_loss": "mel_output", "post_mel_loss": "mel_outputs_postnet"}
    losses = {name: nn.functional.mse_loss(outputs[output], mels) for name, output in names.items()}
    return {"loss": losses["mel_loss"] + losses["post_mel_loss"], **losses}


class Flow(nn.Module):
    """Waves [batch, 8] to noise, conditioned on frames [batch, 4], and the logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, wav: Tensor, mel: Tensor) -> tuple[Tensor, Tensor]:
        (first, second), logs = wav.chunk(2, -1), torch.zeros(())
        for net in self.nets:
            scale, shift = net(torch.cat([first, mel], -1)).chunk(2, -1)
            first, second, logs = second * scale.tanh().exp() + shift, first, logs + scale.tanh().sum()
        return torch.cat([first, second], -1), logs


def shapes(base: Any) -> dict[str, Any]:
    """Name of an example -> its experiment, derived from a base class."""

    class Ge2e(base):
        def setup_model(self) -> None:
            self.model = self.model_core = SpeakerEncoder()
            self.optimizer = torch.optim.Adam(self.model.parameters(), self.config.training.lr)

        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(Utterances(), batch_sampler=Speakers(), collate_fn=clips)

        def train_batch(self) -> None:
            specs = self.read_batch()
            self.optimizer.zero_grad()
            self.model.train()
            loss, eer = self.model(specs, 3)
            loss.backward()
            self.model_core.do_gradient_ops()
            clip_grad_norm_(self.model.parameters(), 3)
            self.optimizer.step()
            self.logger.info("step: %d, loss: %.6f err: %.6f", self.iteration, loss.item(), eer)
            self.visualizer.add_scalar("train/loss", loss.item(), self.iteration)
            self.visualizer.add_scalar("train/eer", eer, self.iteration)
            self.visualizer.add_scalar("param/w", self.model_core.similarity_weight.item(), self.iteration)

        def valid(self) -> None:
            pass

    class Tacotron2(base):
        voices = False

        def setup_model(self) -> None:
            self.model = Tacotron(self.voices)
            self.optimizer = torch.optim.Adam(self.model.parameters(), self.config.training.lr, weight_decay=1e-3)

        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(Sentences(11, seed=1), batch_size=4, shuffle=True, drop_last=True)
            self.valid_loader = DataLoader(Sentences(5, seed=3), batch_size=4)

        def outputs_of(self, batch: Any) -> Any:
            return self.model(batch[0])

        def train_batch(self) -> None:
            batch = self.read_batch()
            self.optimizer.zero_grad()
            self.model.train()
            losses = tacotron_losses(self.outputs_of(batch), batch[2])
            losses["loss"].backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for name, value in losses.items():
                self.visualizer.add_scalar(f"train_loss/{name}", value.item(), self.iteration)

        def valid(self) -> None:
            # Parakeet calls it as the model was trained; ours is in evaluation mode unless it says otherwise.
            self.model.train()
            losses = defaultdict(list)
            for number, batch in enumerate(self.valid_loader):
                outputs = self.outputs_of(batch)
                for name, value in tacotron_losses(outputs, batch[2]).items():
                    losses[name].append(value.item())
                for name in ("alignments", "mel_outputs_postnet"):
                    self.visualizer.add_figure(f"valid_sentence_{number}_{name}", Figure(outputs[name]), self.iteration)
            for name, values in losses.items():
                self.visualizer.add_scalar(f"valid/{name}", sum(values) / len(values), self.iteration)

    class Tacotron2Aishell3(Tacotron2):
        voices = True

        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.test_loader = DataLoader(self.valid_loader.dataset, batch_size=1)

        def outputs_of(self, batch: Any) -> Any:
            return self.model(batch[0], tones=batch[1], global_condition=batch[3])

        def eval(self) -> None:
            self.model.eval()
            folder = self.output_dir / f"eval_{self.iteration}"
            folder.mkdir(parents=True, exist_ok=True)
            with torch.no_grad():
                for number, batch in enumerate(self.test_loader):
                    total = self.outputs_of(batch)["mel_outputs_postnet"].sum().item()
                    (folder / f"sentence_{number}.txt").write_text(repr(total))

    class WaveFlow(base):
        def setup_model(self) -> None:
            self.model = Flow()
            self.optimizer = torch.optim.Adam(self.model.parameters(), self.config.training.lr)

        def setup_dataloader(self) -> None:
            data = list(zip(noise(9, 4, seed=5), noise(9, 8, seed=6), strict=True))
            self.train_loader = DataLoader(data, batch_size=2, shuffle=True, drop_last=True)
            self.valid_loader = DataLoader(data[:2], batch_size=1)

        def loss(self, batch: Any) -> Tensor:
            z, logs = self.model(batch[1], batch[0])
            return (z.square().sum() / 2 - logs) / z.numel() + math.log(2 * math.pi) / 2

        def train_batch(self) -> None:
            batch = self.read_batch()
            self.model.train()
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.visualizer.add_scalar("train/loss", loss.item(), self.iteration)

        def valid(self) -> None:
            self.visualizer.add_scalar("valid/loss", self.loss(next(iter(self.valid_loader))).item(), self.iteration)

    return {"ge2e": Ge2e, "tacotron2": Tacotron2, "tacotron2_aishell3": Tacotron2Aishell3, "waveflow": WaveFlow}
