"""Which request owns which KV page, and which pages can be found again by their content. Bookkeeping without torch.

A page is in exactly one of three states:

    free     [0 owners, no hash]   in `_free`; content meaningless
    owned    [1+ owners]           in the `page_ids` of that many requests; content shared only if it has a hash
    cached   [0 owners, hash]      in `_cached`; found again by hash, or evicted when free pages run out

Only full pages of computed and committed tokens get a hash. It chains: parent's hash, the page's tokens; the root names
the adapter and the salt. Where an adapter applies from a later token on (aLoRA), the pages that end before that token
are the base model's, and the first page after it names the adapter and the position.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b
from itertools import compress
from operator import not_

from lorikeet.shard.requests.request import Request


class Admission(Enum):
    """The result of admitting a request."""

    ADMITTED = "admitted"
    AWAITS = "another request is computing its next page"
    FULL = "too few pages"


class KvCache:
    """The pool of pages, the page table of each request, and the prefix cache.

    What happens to a request's pages:

        admit      it gets pages for its known tokens, the first ones from the prefix cache; grow and shrink follow
        announce   the pages that it is about to fill are listed, so that requests with the same prefix wait for them
        publish    its full committed pages get a hash: others find them from now on
        release    it gives all pages back: those with a hash become cached, the others free
        forget     pages that were computed with an adapter lose their hash: the adapter was unloaded
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.num_touched = 0
        """Pages from the first one that have been handed out so far."""
        self._free = deque(range(num_pages))
        self._num_owners = [0] * num_pages
        self.num_uses = [0] * num_pages
        """By page: how often it was handed out for new content."""
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}
        self._adapter_by_page: dict[int, str] = {}  # adapter digest of each page with a hash
        self._computing: dict[bytes, Request] = {}  # announced pages: the request that fills them, by hash

    @property
    def num_available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without owner, kept for prefix hits."""
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        """Pages owned by requests."""
        return self.num_pages - self.num_available

    def num_needed(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def admit(self, request: Request, num_spare: int) -> Admission:
        """Give a request without pages as many as its known tokens need. The leading ones are shared if the prefix
        cache has them, and their tokens count as computed.

        FULL if fewer than `num_spare` pages would stay available. The request gets pages only if it is ADMITTED.
        """
        if request.awaited_hash is not None and request.awaited_hash in self._computing:
            return Admission.AWAITS
        num_pages = self.num_needed(len(request.token_ids))
        num_shareable = request.num_shareable // self.page_size if self.prefix_caching else 0
        # Too few pages even if all shareable ones are found: no hash is computed for a request that waits.
        if self.num_available < num_pages - num_shareable + num_spare:
            return Admission.FULL
        shared = self._find(request, num_shareable)
        if len(shared) < num_shareable and request.page_hashes[len(shared)] in self._computing:
            request.awaited_hash = request.page_hashes[len(shared)]
            return Admission.AWAITS
        request.awaited_hash = None
        # Now exactly. Cached pages count as available until they are shared.
        num_from_cached = sum(self._num_owners[page] == 0 for page in shared)
        if self.num_available - num_from_cached < num_pages - len(shared) + num_spare:
            return Admission.FULL
        for page in shared:
            self._num_owners[page] += 1
            self._cached.pop(page, None)
        request.page_ids = shared + [self._take() for _ in range(num_pages - len(shared))]
        request.num_computed = request.num_committed = len(shared) * self.page_size
        request.num_published = len(shared)
        self._announce(request)
        return Admission.ADMITTED

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request further pages until it has enough for `num_tokens` tokens. False, and no page is given, if too
        few are available.
        """
        num_missing = self.num_needed(num_tokens) - len(request.page_ids)
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            request.page_ids.append(self._take())
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Free the request's pages after its first `num_tokens` tokens. They hold nothing committed."""
        for page in reversed(request.page_ids[self.num_needed(num_tokens) :]):
            self._num_owners[page] -= 1
            self._free.appendleft(page)
        del request.page_ids[self.num_needed(num_tokens) :]

    def publish(self, request: Request) -> None:
        """Let others find the request's full committed pages. Content that is published already stays private."""
        num_full = request.num_committed // self.page_size
        if not self.prefix_caching or num_full <= request.num_published:
            return
        self._hash(request, num_full)
        for index in range(request.num_published, num_full):
            page_hash, page = request.page_hashes[index], request.page_ids[index]
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]
            if page_hash not in self._page_by_hash:
                self._page_by_hash[page_hash] = page
                self._hash_by_page[page] = page_hash
                if request.adapter_digest and (index + 1) * self.page_size > request.adapter_start:
                    self._adapter_by_page[page] = request.adapter_digest
        request.num_published = num_full

    def release(self, request: Request) -> None:
        """Take all pages from a request. No launched step may still write them."""
        for page_hash in request.page_hashes[request.num_published :]:
            if self._computing.get(page_hash) is request:
                del self._computing[page_hash]
        for page in reversed(request.page_ids):  # so that a prefix is evicted from its end, and runs ascend again
            self._num_owners[page] -= 1
            if self._num_owners[page]:
                continue
            if page in self._hash_by_page:
                self._cached[page] = None
            else:
                self._free.appendleft(page)
        request.page_ids = []
        request.num_computed = request.num_committed = request.num_published = 0

    def forget(self, adapter_digest: str) -> None:
        """Remove the hashes of all pages that were computed with this adapter."""
        for page in [page for page, digest in self._adapter_by_page.items() if digest == adapter_digest]:
            self._forget_page(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check(self, owners: Iterable[Request]) -> None:
        """Prove that every page is accounted for, given all requests that own pages. Raises RuntimeError."""
        num_owners = [0] * self.num_pages
        for request in owners:
            for page in request.page_ids:
                num_owners[page] += 1
        unowned = sorted([*self._free, *self._cached])
        faults = {
            "owner counts": num_owners != self._num_owners,
            "free + cached + owned": unowned != list(compress(range(self.num_pages), map(not_, num_owners))),
            "hash of a free page": not self._hash_by_page.keys().isdisjoint(self._free),
            "cached page without hash": not self._cached.keys() <= self._hash_by_page.keys(),
            "adapter of a page without hash": not self._adapter_by_page.keys() <= self._hash_by_page.keys(),
            "hash table": {page: page_hash for page_hash, page in self._page_by_hash.items()} != self._hash_by_page,
            "page announced by a request without it": any(not owner.page_ids for owner in self._computing.values()),
        }
        if any(faults.values()):
            raise RuntimeError("KV pages leaked: " + ", ".join(name for name, found in faults.items() if found))

    def _find(self, request: Request, num_pages: int) -> list[int]:
        """The pages of the longest prefix, up to `num_pages`, that is published."""
        self._hash(request, num_pages)
        pages: list[int] = []
        for page_hash in request.page_hashes[:num_pages]:
            page = self._page_by_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def _announce(self, request: Request) -> None:
        """Record which pages this request is about to compute, so that others wait for them."""
        if self.prefix_caching:
            self._hash(request, len(request.token_ids) // self.page_size)
            for page_hash in request.page_hashes[request.num_published :]:
                if page_hash not in self._page_by_hash:
                    self._computing.setdefault(page_hash, request)

    def _hash(self, request: Request, num_pages: int) -> None:
        """Extend the request's chain of hashes to `num_pages` pages."""
        hashes = request.page_hashes
        while len(hashes) < num_pages:
            first = len(hashes) * self.page_size
            parent = self._parent(request, first)
            tokens = array("I", request.token_ids[first : first + self.page_size])
            hashes.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())

    def _parent(self, request: Request, first: int) -> bytes:
        """What the hash of the page that begins at position `first` continues."""
        start = request.adapter_start
        if not request.adapter_digest or start == 0:
            return request.page_hashes[-1] if first else root_hash(request.adapter_digest, request.cache_salt)
        parent = request.page_hashes[-1] if first else root_hash("", request.cache_salt)
        if first <= start < first + self.page_size:
            return blake2b(parent + root_hash(request.adapter_digest, str(start)), digest_size=32).digest()
        return parent

    def _forget_page(self, page: int) -> None:
        del self._page_by_hash[self._hash_by_page.pop(page)]
        self._adapter_by_page.pop(page, None)

    def _take(self) -> int:
        """A page for one owner, evicting the least recently used prefix page if none is free."""
        if self._free:
            page = self._free.popleft()
            self.num_touched = max(self.num_touched, page + 1)
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget_page(page)
        self._num_owners[page] = 1
        self.num_uses[page] += 1
        return page


def root_hash(adapter_digest: str, salt: str) -> bytes:
    """The root of all page hashes of an adapter and a salt."""
    names = (adapter_digest.encode(), salt.encode())
    return blake2b(b"".join(len(name).to_bytes(8, "little") + name for name in names), digest_size=32).digest()
