"""What `lmtools download` knows: one table of artifacts, where they lie and how to recognise them.

Sizes and hashes come from public records: the WikiText ones from the `dataset_infos.json` of Hugging Face's
`datasets`, the GPT-2 ones from OpenAI's tiktoken, the Transformer-XL ones from the repository's own Git LFS pointers.
The published address of WikiText (`s3.amazonaws.com/research.metamind.io`) has refused everybody since 2024 and is
left out. Mirrors on Hugging Face are pinned to a revision, so that they cannot change.
"""

from __future__ import annotations

from dataclasses import dataclass

_FAIRSEQ = "https://dl.fbaipublicfiles.com/fairseq"
_SMERITY = "https://wikitext.smerity.com"
_WIKITEXT_2_MIRROR = "https://huggingface.co/datasets/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9"
_WIKITEXT_103_MIRROR = (
    "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/3555105b17ae31cc619a136fac72dbe2865c3738"
)
_TRANSFO_XL = "https://huggingface.co/transfo-xl/transfo-xl-wt103/resolve/40a186da79458c9f9de846edfaea79c412137f97"


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch.

    Attributes:
        name: its name on the disk.
        urls: where it lies, in the order to try.
        num_bytes: its exact size, None where no public record says it.
        sha256: its hash, None where no public record says it.
    """

    name: str
    urls: tuple[str, ...]
    num_bytes: int | None = None
    sha256: str | None = None

    @property
    def is_archive(self) -> bool:
        """Whether it is unpacked after the download."""
        return self.name.endswith((".zip", ".tar.gz"))


@dataclass(frozen=True)
class Artifact:
    """What a name on the command line stands for.

    Attributes:
        name: the name.
        description: what it is, in one line.
        folder: the folder under the destination that holds it in the end. An archive must contain this folder.
        files: what to fetch: one archive, or plain files.
        unpacked_num_bytes: at least so many bytes come out of the archive; for the check of the disk beforehand.
    """

    name: str
    description: str
    folder: str
    files: tuple[RemoteFile, ...]
    unpacked_num_bytes: int = 0

    @property
    def archive(self) -> RemoteFile | None:
        """The archive, if the artifact is one."""
        return self.files[0] if self.files[0].is_archive else None


ARTIFACTS: tuple[Artifact, ...] = (
    Artifact(
        name="megatron-11b",
        description="Megatron-11b, fairseq's model of 11 billion parameters in 8 parts (19 GB)",
        folder="megatron_11b",
        files=(RemoteFile("megatron_11b.tar.gz", (f"{_FAIRSEQ}/models/model_parallel/megatron_11b.tar.gz",)),),
        unpacked_num_bytes=11_032_246_272 * 2,  # two bytes a parameter, if the parts are float16
    ),
    Artifact(
        name="gpt2-bpe",
        description="GPT-2's byte-pair encoding, which is also built in",
        folder="gpt2_bpe",
        files=(
            RemoteFile(
                "encoder.json",
                (
                    f"{_FAIRSEQ}/gpt2_bpe/encoder.json",
                    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
                ),
                num_bytes=1_042_301,
                sha256="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
            RemoteFile(
                "vocab.bpe",
                (
                    f"{_FAIRSEQ}/gpt2_bpe/vocab.bpe",
                    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
                ),
                num_bytes=456_318,
                sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
        ),
    ),
    Artifact(
        name="gpt2-dict",
        description="fairseq's dictionary for GPT-2 BPE, RoBERTa's and Megatron-11b's",
        folder="gpt2_bpe",
        files=(RemoteFile("dict.txt", (f"{_FAIRSEQ}/gpt2_bpe/dict.txt",)),),
    ),
    Artifact(
        name="wikitext-103-raw",
        description="WikiText-103, raw text (CC BY-SA)",
        folder="wikitext-103-raw",
        files=(
            RemoteFile(
                "wikitext-103-raw-v1.zip",
                (f"{_SMERITY}/wikitext-103-raw-v1.zip", f"{_WIKITEXT_103_MIRROR}/wikitext-103-raw-v1.zip"),
                num_bytes=191_984_949,
                sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
            ),
        ),
        unpacked_num_bytes=540_000_000,
    ),
    Artifact(
        name="wikitext-103",
        description="WikiText-103, words with rare ones as <unk> (CC BY-SA)",
        folder="wikitext-103",
        files=(
            RemoteFile(
                "wikitext-103-v1.zip",
                (f"{_SMERITY}/wikitext-103-v1.zip",),
                num_bytes=190_229_076,
                sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
            ),
        ),
        unpacked_num_bytes=540_000_000,
    ),
    Artifact(
        name="wikitext-2-raw",
        description="WikiText-2, raw text (CC BY-SA)",
        folder="wikitext-2-raw",
        files=(
            RemoteFile(
                "wikitext-2-raw-v1.zip",
                (f"{_SMERITY}/wikitext-2-raw-v1.zip", f"{_WIKITEXT_2_MIRROR}/wikitext-2-raw-v1.zip"),
                num_bytes=4_721_645,
                sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
            ),
        ),
        unpacked_num_bytes=13_378_183,
    ),
    Artifact(
        name="wikitext-2",
        description="WikiText-2, words with rare ones as <unk> (CC BY-SA)",
        folder="wikitext-2",
        files=(
            RemoteFile(
                "wikitext-2-v1.zip",
                (f"{_SMERITY}/wikitext-2-v1.zip",),
                num_bytes=4_475_746,
                sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            ),
        ),
        unpacked_num_bytes=13_000_000,
    ),
    Artifact(
        name="transfo-xl-wt103",
        description="Transformer-XL for WikiText-103 (257 million parameters), Hugging Face's files",
        folder="transfo-xl-wt103",
        files=(
            RemoteFile("config.json", (f"{_TRANSFO_XL}/config.json",), num_bytes=856),
            RemoteFile(
                "vocab.bin",
                (f"{_TRANSFO_XL}/vocab.bin",),
                num_bytes=9_143_613,
                sha256="15fd9c4c661005546d0ddacefc782914e364fdcf5bbf2baf9090e44f8c6cf93d",
            ),
            RemoteFile(
                "pytorch_model.bin",
                (f"{_TRANSFO_XL}/pytorch_model.bin",),
                sha256="edd5e62f5edb8ef65703ef827ab0bcd16ab29f2b853cfd9d11d81faa1bc7a0fb",
            ),
        ),
    ),
)
