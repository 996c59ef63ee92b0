"""Where adapters come from and are kept, worked out from the settings and the environment before a process starts."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models.fetch import TOKEN_VARIABLES
from lorikeet.launcher.models.model import embedded

_FOLDER = "lorikeet-adapters"


@dataclass(frozen=True)
class AdapterPlan:
    """What the router, the loader and the shards are told."""

    hub_cache: Path
    store: Path
    """Of served adapters, for this base in this number format alone."""
    roots: tuple[str, ...]
    hub_token: str | None = field(default=None, repr=False)
    admin_key_sha256: str | None = None
    warning: str = ""
    """What the operator should know."""

    @property
    def sources(self) -> dict[str, object]:
        """The part of a configuration that says where sources look, without sizes."""
        return {
            "local_roots": list(self.roots),
            "hidden": [str(self.store.parent)],
            "hub_cache": str(self.hub_cache),
            "notes": str(self.store.parent / "public"),
        }


def plan(settings: Settings, environment: Mapping[str, str], model: Path, folder: Path) -> AdapterPlan:
    """`folder` is this run's own: the store of last resort. Raises LauncherError."""
    cache = hub_cache(settings, environment)
    roots = settings["local-adapter-root"]
    for root in roots:
        if "local-adapter-root" in settings.given and not Path(root).is_dir():
            _refuse(f"{settings.given['local-adapter-root']} {root} is no folder")
    store, warning = _store(settings, cache, model, folder)
    token = next((environment[name] for name in TOKEN_VARIABLES if environment.get(name)), None)
    admin = _admin_key(settings, environment)
    return AdapterPlan(cache, store, tuple(roots) or (str(cache),), token, admin, warning)


def with_family(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings with the embedded model's own adapters by alias, where neither a model nor adapters are named."""
    if settings["model-id"] is not None or settings["adapters"] is not None or settings["local-adapter-root"]:
        return settings
    family = embedded().path.parent
    roots = (str(family / "adapters"), str(family), str(hub_cache(settings, environment)))
    return settings.with_values(adapters=str(_family_catalogue()), local_adapter_root=roots)


def is_family(settings: Settings) -> bool:
    """Whether the embedded model's own adapters are served."""
    return settings["model-id"] is None and settings["adapters"] == str(_family_catalogue())


def _family_catalogue() -> Path:
    return embedded().path.parent / "adapters.yaml"


def hub_cache(settings: Settings, environment: Mapping[str, str]) -> Path:
    """Where the hub's library keeps what it fetched."""
    given = settings["huggingface-hub-cache"] or environment.get("HF_HUB_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    home = environment.get("HF_HOME")
    if not home:
        home = os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser().absolute() / "hub"


def _admin_key(settings: Settings, environment: Mapping[str, str]) -> str | None:
    """The hash of the administrator's key: nobody else needs the key itself."""
    key, path = environment.get("ADMIN_KEY", ""), settings["admin-key-file"]
    if path is not None:
        try:
            key = Path(path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            _refuse(f"{settings.given['admin-key-file']} {path} cannot be read: {reason}")
        if not key:
            _refuse(f"{settings.given['admin-key-file']} {path} is empty")
    return hashlib.sha256(key.encode()).hexdigest() if key else None


def _store(settings: Settings, cache: Path, model: Path, folder: Path) -> tuple[Path, str]:
    """The folder of served adapters, made; and a warning where it is not the one that is meant to be."""
    given = settings["adapter-store"]
    name = base_name(model, settings["dtype"])
    wanted = (Path(given).expanduser().absolute() if given else cache / _FOLDER) / name
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted, ""
        reason = "it is not writable"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if given:
        _refuse(f"{settings.given['adapter-store']} {given} cannot be used: {reason}")
    own = folder / _FOLDER / name
    own.mkdir(mode=0o700, parents=True)
    return own, f"{wanted} cannot be used ({reason}): adapters are kept until the end of this run only"


def base_name(model: Path, dtype: str | None) -> str:
    """Short and different for models whose served adapters differ."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    digest.update(f"\0{dtype}".encode())
    return digest.hexdigest()[:16]


def _refuse(sentence: str) -> None:
    raise LauncherError(Exit.ARGUMENT_VALIDATION, sentence)
