"""Whether a shard may stand beside the others of a router: any must be able to go on with another's requests."""

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.version import version, versions_compatible

ALIKE = ("model_id", "dtype", "quantization", "kv_cache_dtype", "num_ranks", "vocab_size", "max_total_tokens")
"""What must be the same of all, by the names of the wire."""


def incompatible(info: pb.ShardInfo, known: pb.ShardInfo | None) -> str:
    """Why a shard cannot be used, in a sentence; empty if it can. `known`: of one that is connected, if any is."""
    if not versions_compatible(info.version, version()):
        return f"the shard's version {info.version} and this router's, {version()}, don't fit together"
    for name in ALIKE if known is not None else ():
        theirs, ours = getattr(info, name), getattr(known, name)
        if theirs != ours:
            return f"its {name} is {theirs or 'none'}, that of the others {ours or 'none'}"
    return ""
