"""Image options in serve_config.yaml."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Limits on the images of requests (docs/images.md)."""

    max_per_request: int = option(16, "Maximum number of images per request; 0 refuses all.")
    max_bytes: int = option(20 * 2**20, "Maximum size of an image file in bytes.")
    max_pixels: int = option(2**25, "Maximum width times height of an image. A pixel takes about 16 bytes to process.")
    fetch_urls: bool = option(True, "Load images from http and https URLs; otherwise only data: URLs are accepted.")
    fetch_timeout_s: float = option(10.0, "Seconds to load an image from its URL, redirects included.")
    max_redirects: int = option(3, "Redirects to follow for an image, each checked like the first URL.")
    allowed_media_domains: tuple[str, ...] = option((), "Hosts from which images may be loaded. Default: all.")
    allowed_private_networks: tuple[str, ...] = option(
        (),
        "Networks such as `10.1.0.0/16` from which images may be loaded although they are not public. Clients can "
        "then probe these networks.",
    )
    max_in_flight: int = option(32, "Images that an ingress loads or processes at a time; others wait.")
    max_processed_bytes: int = option(
        2**31,
        "Bytes of processed images in one ingress. An image counts from before it is processed until its answer "
        "has ended. If the limit is reached, other requests with images wait.",
    )
    max_processing: int = option(2, "Images that are decoded and resized at a time, each in a thread.")

    def __post_init__(self) -> None:
        at_least_1 = "max_bytes max_pixels max_in_flight max_processed_bytes max_processing"
        check_limits(self, {"at least 0": "max_per_request max_redirects", "at least 1": at_least_1}, "ingress.images.")
        if not 0 < self.fetch_timeout_s < float("inf"):
            raise ConfigError("ingress.images.fetch_timeout_s", self.fetch_timeout_s, "above 0")
        for network in self.allowed_private_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError("ingress.images.allowed_private_networks", network, f"a network ({error})") from None
