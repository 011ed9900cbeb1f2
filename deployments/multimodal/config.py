"""Options of images in serve_config.yaml."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from engine.config import option
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Limits on the images of requests (docs/images.md)."""

    max_per_request: int = option(16, "Images of one request; 0 refuses all.")
    max_bytes: int = option(20 * 2**20, "Size of an image file.")
    max_pixels: int = option(2**25, "Width times height of an image, which takes about 16 bytes each to process.")
    fetch_urls: bool = option(True, "Load images from http and https URLs; without it they come as data: URLs only.")
    fetch_timeout_s: float = option(10.0, "Time for an image to be loaded from its URL, redirects included.")
    max_redirects: int = option(3, "Redirects that are followed for an image, each checked like the first URL.")
    allowed_media_domains: tuple[str, ...] = option((), "Hosts that images may be loaded from; by default all.")
    allowed_private_networks: tuple[str, ...] = option(
        (),
        "Networks such as `10.1.0.0/16` that images may be loaded from although they are not public. Clients can "
        "then find out what answers there.",
    )
    max_in_flight: int = option(32, "Images that one ingress loads or processes at a time; others wait.")
    max_processed_bytes: int = option(
        2**31,
        "Bytes of processed images in one ingress, from before they are processed until the answers about them have "
        "ended; other requests with images wait.",
    )
    max_processing: int = option(2, "Images of those that are decoded and resized at a time, each in a thread.")

    def __post_init__(self) -> None:
        for key in ("max_per_request", "max_redirects"):
            if getattr(self, key) < 0:
                raise ConfigError(f"ingress.images.{key}", getattr(self, key), "at least 0")
        for key in ("max_bytes", "max_pixels", "max_in_flight", "max_processed_bytes", "max_processing"):
            if getattr(self, key) < 1:
                raise ConfigError(f"ingress.images.{key}", getattr(self, key), "at least 1")
        if not 0 < self.fetch_timeout_s < float("inf"):
            raise ConfigError("ingress.images.fetch_timeout_s", self.fetch_timeout_s, "above 0")
        for network in self.allowed_private_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError("ingress.images.allowed_private_networks", network, f"a network ({error})") from None
