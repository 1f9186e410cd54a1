"""Runs a BERT-like text encoder in ONNX format, and returns vectors of unit length.

The packages onnxruntime and tokenizers belong to the extras [cpu] and [gpu]. They are imported only
when an encoder is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.retrieval.encoding import (
    FILES,
    NO_SIMILAR_WORDS,
    Recipe,
    Vectors,
    pooled,
    recipe,
)
from evoke_proxy.errors import ConfigError, EmbedderError, pip_install

_MODELS = ("model.onnx", "onnx/model.onnx")
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
_CUDA = "CUDAExecutionProvider"
# Most tokens of one inference, padding included; this limits its memory and time.
_BATCH_TOKENS = 1024
# A text is cut to this many characters per token of the encoder before it is tokenized.
_CHARS_PER_TOKEN = 32
_DOES_NOT_LOAD = "embedder.directory: {} cannot be loaded: {}; export or fetch it again"
_OR_WITHOUT = "leave embedder.directory empty for the built-in word vectors"


class OnnxEncoder:
    """A loaded encoder; its methods may be called from several threads at a time.

    Attributes:
        name: The name of its directory, without parents.
        is_immediate: False, because a text takes milliseconds.
        is_english: False; which languages a model has been trained on is not known.
        similar_words: Empty; the built-in word vectors have a table of them.
        dimensions: The length d of its vectors.
        fingerprint: 32 bytes; encoders with different vectors have different ones.
        recipe: Pooling, maximum length, and the texts put before questions and documents.
    """

    is_immediate = False
    is_english = False
    similar_words = NO_SIMILAR_WORDS

    def __init__(self, config: EmbedderConfig) -> None:
        """Load an encoder and run it once; raises ConfigError with the cause and the fix."""
        self._directory = Path(config.directory).expanduser()
        self.name = self._directory.name
        model = _model_file(self._directory)
        self.recipe = recipe(_read_files(self._directory), config)
        self._tokenizer = _tokenizer(self._directory, self.recipe)
        self._pad = _pad_id(self._tokenizer)
        self._session = _session(model, config)
        self._inputs = _inputs(self._session, model)
        self._output = _output(self._session)
        self.fingerprint = _fingerprint(self._directory, model, self.recipe, self._output)
        self.dimensions = self._try(model)

    def describe(self) -> str:
        """Describe the encoder in one line, for the log."""
        device = "CUDA" if self._session.get_providers()[0] == _CUDA else "CPU"
        return (
            f"{self._directory}: {self.dimensions} dimensions, pooling {self.recipe.pooling},"
            f" {self.recipe.max_tokens} tokens, {device}"
        )

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return vectors of questions, each embedded after the query instruction.

        See `documents`.
        """
        return self._encoded([self.recipe.query_instruction + text for text in texts])

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Return vectors of the texts to search: float32 [n, d], of unit length, in their order.

        A text longer than `recipe.max_tokens` is cut. Raises EmbedderError when inference fails.
        """
        return self._encoded([self.recipe.document_instruction + text for text in texts])

    def _encoded(self, texts: Sequence[str]) -> Vectors:
        limit = self.recipe.max_tokens * _CHARS_PER_TOKEN
        # JSON may contain half of a surrogate pair, which tokenizers reject.
        valid = [text[:limit].encode("utf-8", "replace").decode("utf-8") for text in texts]
        try:
            tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(valid)]
            results = [(batch, self._run([tokens[i] for i in batch])) for batch in _batches(tokens)]
        except Exception as error:  # onnxruntime's errors have no base of their own
            raise EmbedderError(f"the embedder failed: {_first_line(error)}") from error
        vectors = np.zeros((len(texts), results[0][1].shape[1] if results else 0), np.float32)
        for batch, rows in results:
            vectors[batch] = rows
        if not np.isfinite(vectors).all():
            raise EmbedderError("the embedder made vectors that are not numbers")
        return vectors

    def _run(self, batch: Sequence[Sequence[int]]) -> Vectors:
        longest = max(len(ids) for ids in batch)
        values = np.full((len(batch), longest), self._pad)
        mask = np.zeros_like(values)
        for row, ids in enumerate(batch):
            values[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        inputs = {_INPUTS[0]: values, _INPUTS[1]: mask, _INPUTS[2]: np.zeros_like(values)}
        feed = {name: inputs[name].astype(kind) for name, kind in self._inputs.items()}
        rows = self._session.run([self._output], feed)[0]
        if rows.ndim not in (2, 3) or len(rows) != len(batch):
            raise ValueError(f"output {self._output} has shape {list(rows.shape)}")
        return pooled(rows, mask, self.recipe.pooling)

    def _try(self, model: Path) -> int:
        """Run a first inference, which is the slowest; returns the number of dimensions."""
        try:
            return int(self.documents(["", "a " * self.recipe.max_tokens]).shape[1])
        except EmbedderError as error:
            raise ConfigError(f"embedder.directory: {model}: {error}") from error


def _batches(tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield batches of indexes of texts; those of a batch have similar lengths, to pad little."""
    batch: list[int] = []
    for index in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
        if batch and (len(batch) + 1) * len(tokens[index]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _model_file(directory: Path) -> Path:
    try:
        is_directory = directory.is_dir()
    except OSError as error:  # the name is too long, or a part of the path cannot be read
        raise ConfigError(
            f"embedder.directory cannot be read: {error.strerror}; name another, or {_OR_WITHOUT}"
        ) from error
    if not is_directory:
        raise ConfigError(
            f"embedder.directory: {directory} is not a directory; evoke-proxy embedder fetch"
            f" fetches an encoder, or {_OR_WITHOUT}"
        )
    for name in _MODELS:
        if (directory / name).is_file():
            return directory / name
    raise ConfigError(
        f"embedder.directory: {directory} has neither {' nor '.join(_MODELS)};"
        f" put an encoder in ONNX format there, or {_OR_WITHOUT}"
    )


def _read_files(directory: Path) -> dict[str, Any]:
    files = {}
    for name in FILES:
        path = directory / name
        try:
            if path.is_file():
                files[name] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(_DOES_NOT_LOAD.format(path, error)) from error
    return files


def _tokenizer(directory: Path, how: Recipe) -> Any:
    tokenizers = _package("tokenizers")
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"embedder.directory: {path} is missing; copy it from the repository of the model"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.enable_truncation(how.max_tokens)
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(_DOES_NOT_LOAD.format(path, _first_line(error))) from error
    return tokenizer


def _pad_id(tokenizer: Any) -> int:
    """Return the padding token of a tokenizer, and switch off the padding by the tokenizer."""
    padding = tokenizer.padding
    tokenizer.no_padding()
    if padding:
        return int(padding["pad_id"])
    ids = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>"))
    return next((number for number in ids if number is not None), 0)


def _session(model: Path, config: EmbedderConfig) -> Any:
    runtime = _package("onnxruntime")
    available = runtime.get_available_providers()
    if config.device == "cuda" and _CUDA not in available:
        raise _no_cuda(f"onnxruntime offers only {', '.join(available)}")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # fatal errors only; other errors are raised as exceptions
    # By default onnxruntime caches a memory plan for every shape, and its threads spin while idle.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = runtime.InferenceSession(str(model), options, _providers(available, config))
    except Exception as error:  # onnxruntime's errors have no base of their own
        raise ConfigError(_DOES_NOT_LOAD.format(model, _first_line(error))) from error
    if config.device == "cuda" and session.get_providers()[0] != _CUDA:
        raise _no_cuda("onnxruntime found no usable GPU or CUDA library")
    return session


def _providers(available: Sequence[str], config: EmbedderConfig) -> list[Any]:
    # llama-server uses the same GPU, so onnxruntime allocates only as much memory as it requests.
    cuda = (_CUDA, {"arena_extend_strategy": "kSameAsRequested"})
    uses_cuda = config.device != "cpu" and _CUDA in available
    return [cuda, "CPUExecutionProvider"] if uses_cuda else ["CPUExecutionProvider"]


def _no_cuda(why: str) -> ConfigError:
    return ConfigError(
        f"embedder.device: {why}; install the extra [gpu] instead of [cpu] and the version of CUDA"
        " that onnxruntime-gpu needs, or set embedder.device to cpu"
    )


def _inputs(session: Any, model: Path) -> dict[str, npt.DTypeLike]:
    """Return the inputs of the model with their types.

    Raises ConfigError when the proxy cannot provide an input.
    """
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    inputs = {value.name: kinds.get(value.type) for value in session.get_inputs()}
    if not set(inputs) <= set(_INPUTS) or None in inputs.values() or _INPUTS[0] not in inputs:
        raise ConfigError(
            f"embedder.directory: {model} has the inputs {', '.join(inputs)}; the proxy provides"
            f" only {', '.join(_INPUTS)}, as whole numbers: export a text encoder with these"
        )
    return inputs  # type: ignore[return-value]


def _output(session: Any) -> str:
    """Return the output with a row for each token, by its usual names, else the first output."""
    outputs = [str(value.name) for value in session.get_outputs()]
    return next((name for name in _TOKEN_OUTPUTS if name in outputs), outputs[0])


def _fingerprint(directory: Path, model: Path, how: Recipe, output: str) -> bytes:
    digest = hashlib.blake2b(repr((how, output)).encode(), digest_size=32)
    # Weights over 2 GB are in separate files whose names begin with that of the graph.
    for path in [*sorted(model.parent.glob(f"{model.name}*")), directory / "tokenizer.json"]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.digest()


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"embedder.directory: {name} is not installed; {pip_install('cpu')} or [gpu], or"
            f" {_OR_WITHOUT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
