"""Sources and storage of adapters, from the settings and the environment."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorikeet.adapters.refs import SourceKind
from lorikeet.adapters.sources import listed
from lorikeet.launcher.config import rules
from lorikeet.launcher.config.rules import LoraModule
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse
from lorikeet.launcher.models.model import TOKEN_VARIABLES

_FOLDER = "lorikeet-adapters"
_S3_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_ROLE_ARN", "S3_ENDPOINT_URL", "R2_ACCOUNT_ID")
"""Any of them shows that S3 is used."""


@dataclass(frozen=True)
class AdapterPlan:
    """What the configurations of router, loader and shards need."""

    hub_cache: Path
    store: Path
    """Folder of converted adapters for this base model and data type only."""
    roots: tuple[str, ...]
    hub_token: str | None = field(default=None, repr=False)
    admin_key_sha256: str | None = None
    api_keys_sha256: tuple[str, ...] = ()
    """SHA-256 hashes of the keys of --api-key."""
    modules: tuple[LoraModule, ...] = ()
    """Adapters that a flag names."""
    s3_prefixes: tuple[str, ...] | None = None
    """Where callers may name adapters in S3; None is anywhere."""
    warning: str = ""
    """For the operator, about the store."""
    s3_warning: str = ""

    @property
    def sources(self) -> dict[str, object]:
        """Fields of the sources' configuration, without sizes."""
        return {
            "local_roots": list(self.roots),
            "local_folders": [module.ref.id for module in self.modules if module.ref.source is SourceKind.LOCAL],
            "hidden": [str(self.store.parent)],
            "hub_cache": str(self.hub_cache),
            "notes": str(self.store.parent / "public"),
        }


def plan(settings: Settings, environment: Mapping[str, str], model: Path, folder: Path) -> AdapterPlan:
    """`folder` is this run's private one, the fallback for the store. Raises LauncherError."""
    cache = hub_cache(settings, environment)
    roots = settings["local-adapter-root"]
    for root in roots:
        if "local-adapter-root" in settings.origins and not Path(root).is_dir():
            refuse(f"{settings.origins['local-adapter-root']} {root} is not a folder")
    store, warning = _store(settings, cache, model, folder)
    token = next((environment[name] for name in TOKEN_VARIABLES if environment.get(name)), None)
    admin = _admin_key(settings, environment)
    prefixes, s3_warning = _s3_prefixes(settings, environment)
    return AdapterPlan(
        cache,
        store,
        tuple(roots) or (str(cache),),
        token,
        admin,
        tuple(_sha256(key) for key in settings["api-key"]),
        tuple(rules.read_lora_modules(settings)),
        prefixes,
        warning,
        s3_warning,
    )


def with_demo_adapters(settings: Settings, environment: Mapping[str, str], family: Path | None) -> Settings:
    """The settings with the adapters of a demo model by alias, unless other adapters are given. `family`: the folder
    of the demo model's adapters; None for any other model.
    """
    if family is None or settings["adapters"] is not None or settings["local-adapter-root"]:
        return settings
    roots = (str(family / "adapters"), str(family), str(hub_cache(settings, environment)))
    return settings.with_values(adapters=str(_demo_catalogue(settings, family)), local_adapter_root=roots)


def serves_demo_adapters(settings: Settings, family: Path | None) -> bool:
    """Whether the adapters of a demo model are served."""
    return family is not None and settings["adapters"] == str(_demo_catalogue(settings, family))


def _demo_catalogue(settings: Settings, family: Path) -> Path:
    """Catalogue of a demo model's adapters: those that generate text, or those that embed it."""
    embeds = settings["pooling"] or settings["embedding-dim"] is not None
    return family / ("embedders.yaml" if embeds else "adapters.yaml")


def hub_cache(settings: Settings, environment: Mapping[str, str]) -> Path:
    """The download cache of huggingface_hub."""
    folder = settings["huggingface-hub-cache"] or environment.get("HF_HUB_CACHE")
    if folder:
        return Path(folder).expanduser().absolute()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser().absolute() / "hub"


def _admin_key(settings: Settings, environment: Mapping[str, str]) -> str | None:
    """The hash of the admin key; no process needs the key itself."""
    key, path = environment.get("ADMIN_KEY", ""), settings["admin-key-file"]
    if path is not None:
        try:
            key = Path(path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            refuse(f"{settings.origins['admin-key-file']} {path} cannot be read: {reason}")
        if not key:
            refuse(f"{settings.origins['admin-key-file']} {path} is empty")
    return _sha256(key) if key else None


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _s3_prefixes(settings: Settings, environment: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
    """Where callers may name adapters in S3, and a warning if that is wherever this server's credentials reach."""
    prefixes = tuple(settings["s3-prefix"]) or tuple(filter(None, [listed.s3_home(environment)]))
    if prefixes or rules.is_closed(settings):
        return prefixes, ""
    if not any(environment.get(name) for name in _S3_VARIABLES):
        return None, ""
    sentence = "everyone who reaches this server may use adapters in every bucket that its S3 credentials can read"
    return None, f"{sentence}: name the buckets with --s3-prefix"


def _store(settings: Settings, cache: Path, model: Path, folder: Path) -> tuple[Path, str]:
    """The folder of converted adapters, created, and a warning if it is a temporary one."""
    setting = settings["adapter-store"]
    name = base_name(model, settings["dtype"])
    store = (Path(setting).expanduser().absolute() if setting else cache / _FOLDER) / name
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(store, os.W_OK | os.X_OK):
            return store, ""
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if setting:
        refuse(f"{settings.origins['adapter-store']} {setting} cannot be used: {reason}")
    temporary = folder / _FOLDER / name
    temporary.mkdir(mode=0o700, parents=True)
    return temporary, f"{store} cannot be used ({reason}): converted adapters are lost at the end of this run"


def base_name(model: Path, dtype: str | None) -> str:
    """A short name that differs for models whose converted adapters differ."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    digest.update(f"\0{dtype}".encode())
    return digest.hexdigest()[:16]
