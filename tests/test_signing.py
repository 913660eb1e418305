"""Signatures agree with the published vectors, and with a verifier that is not ours."""

import base64
import datetime
import hashlib
import hmac
import json
from typing import Any

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from actors import signing
from actors.signing import SignatureError, sign, verify

A = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
B = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
MSG = "msg_p5jXN8AQM9LWM0D4loKWxJek"
AT = 1614265330
BODY = b'{"test": 2432232314}'
A_SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

PRIVATE = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
PUBLIC = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
PRIVATE_SIGNATURE = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="

VECTORS = [
    ([A], MSG, AT, BODY, A_SIGNATURE),
    (
        [B],
        "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
        1649367553,
        b'{"email":"test@example.com","username":"test_user"}',
        "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
    ),
    ([A, B], MSG, AT, BODY, f"{A_SIGNATURE} v1,78nXHjpFP0tVJQW5D0SBwmVyyW87BV/rL6MgfM/Bw44="),
    ([A], MSG, 1614265335, BODY, "v1,IFrHNvFdSlxTmO/uOkpKdCwyVAkNxveF9T56NbTULfE="),
    ([A], MSG, AT, b"", "v1,v48jdbgvh29KJz2Qc+ghw8G6vG3nAKnujWBg8oM/62A="),
    ([A], MSG, AT, '{"n":"é😀"}'.encode(), "v1,ka0ZVYvuzNlWkXKx6YCBRrvyKRQUrjYsaCTylkEo2kU="),
    ([A], MSG, AT, b'{"test":2432232314}', "v1,Vif40peJBP7Iyl0XGmu61n4MwdrcHov5CFREBpE0svs="),
    (
        ["whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="],
        "00000000-0000-4000-8000-000000000001",
        1700000000,
        b'{"id":"00000000-0000-4000-8000-000000000001","type":"webhook.test","subject":"",'
        b'"occurred_at":"2023-11-14T22:13:20Z","data":{}}',
        "v1,TQf4TFeuB60ldo4Q+J2X3+OXjexJoT4qAIj+mzPFoJk=",
    ),
    ([PRIVATE], MSG, AT, BODY, PRIVATE_SIGNATURE),
    ([PRIVATE, A], MSG, AT, BODY, f"{A_SIGNATURE} {PRIVATE_SIGNATURE}"),
]


def headers(signature: str = A_SIGNATURE, **changes: str) -> dict[str, str]:
    sent = {"webhook-id": MSG, "webhook-timestamp": str(AT), "webhook-signature": signature}
    return sent | {name.replace("_", "-"): value for name, value in changes.items()}


@pytest.mark.parametrize(("secrets", "webhook_id", "timestamp", "body", "expected"), VECTORS)
def test_every_published_vector_is_signed_as_published(
    secrets: list[str], webhook_id: str, timestamp: int, body: bytes, expected: str
) -> None:
    assert expected == sign(webhook_id, timestamp, body, secrets)


def test_the_hmac_primitive_agrees_with_githubs_published_value() -> None:
    digest = hmac.digest(b"It's a Secret to Everybody", b"Hello, World!", hashlib.sha256)
    assert digest.hex() == "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8)), st.text("abc-0123", min_size=1))
def test_an_independent_verifier_accepts_every_v1_signature(data: dict[str, str], webhook_id: str) -> None:
    secret = signing.make_shared_secret()
    body = json.dumps(data, ensure_ascii=True).encode()
    now = int(datetime.datetime.now(datetime.UTC).timestamp())
    sent = headers(sign(webhook_id, now, body, [secret]), webhook_id=webhook_id, webhook_timestamp=str(now))
    assert data == standardwebhooks.Webhook(secret).verify(body, sent)
    verify(sent, body, [secret], now)


@pytest.mark.parametrize("text", [A, A.removeprefix("whsec_"), A + "=="])
def test_prefix_and_padding_are_optional_on_input(text: str) -> None:
    unpadded = base64.b64encode(b"k" * 32).decode().rstrip("=")
    assert sign(MSG, AT, BODY, [unpadded + "="]) == sign(MSG, AT, BODY, ["whsec_" + unpadded])
    if not text.endswith("="):
        assert sign(MSG, AT, BODY, [text]) == A_SIGNATURE


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_short",
        "whsec_!!!!",
        "whsec_" + "A" * 33,
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaS w",
    ]
    + ["whsec_" + base64.b64encode(b"k" * size).decode() for size in (23, 65)]
    + [
        "whsec_" + base64.urlsafe_b64encode(b"\xff" * 32).decode(),
        "whsk_" + base64.b64encode(b"k" * 64).decode(),
    ]
    + ["whsk_" + base64.b64encode(b"k" * 32).decode(), "whpk_" + base64.b64encode(b"k" * 32).decode()],
)
def test_a_secret_that_is_not_strict_base64_of_the_right_size_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match=r"secret|key|base64|id"):
        sign(MSG, AT, BODY, [secret])
    with pytest.raises(ValueError, match=r"secret|key|base64|id"):
        signing.check_secret(secret)


@pytest.mark.parametrize("webhook_id", ["", "a.b"])
def test_the_signer_refuses_an_id_that_makes_the_content_ambiguous(webhook_id: str) -> None:
    with pytest.raises(ValueError, match=r"secret|key|base64|id"):
        sign(webhook_id, AT, BODY, [A])


def test_signing_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match=r"secret|key|base64|id"):
        sign(MSG, AT, BODY, [])


@pytest.mark.parametrize(
    ("signature", "keys"),
    [
        (A_SIGNATURE, [A]),
        (A_SIGNATURE, [B, A]),
        (f"v1,AAAA v2,BBBB nonsense {A_SIGNATURE}", [A]),
        (PRIVATE_SIGNATURE, [PUBLIC]),
        (f"{A_SIGNATURE} {PRIVATE_SIGNATURE}", [PUBLIC]),
        (f"{A_SIGNATURE} {PRIVATE_SIGNATURE}", [A]),
        (f"v1a,AAAA v1a,_ {PRIVATE_SIGNATURE}", [PUBLIC]),
    ],
)
def test_any_one_fitting_entry_is_enough(signature: str, keys: list[str]) -> None:
    verify(headers(signature), BODY, keys, AT)


def test_header_names_are_read_without_case() -> None:
    verify({name.title(): value for name, value in headers().items()}, BODY, [A], AT)


@pytest.mark.parametrize("drift", [-300, 0, 300])
def test_the_tolerance_holds_in_both_directions(drift: int) -> None:
    verify(headers(), BODY, [A], AT + drift)


@pytest.mark.parametrize("drift", [-301, 301])
def test_a_time_outside_the_tolerance_is_refused(drift: int) -> None:
    with pytest.raises(SignatureError):
        verify(headers(), BODY, [A], AT + drift)


@pytest.mark.parametrize(
    "change",
    [
        {"webhook_signature": value}
        for value in (
            "",
            "v1",
            "v1,",
            A_SIGNATURE[:-2],
            A_SIGNATURE + ",",
            "v1,a,b",
            "v1,é",
            "v1,\udcff",
            "v2,x",
        )
    ]
    + [{"webhook_timestamp": value} for value in ("", "x", "123.5", "-1", "1614265330\n", "\uff11" * 10, "1" * 13)]
    + [{"webhook_id": value} for value in ("", "other", "a.b", "\udcff")],
)
def test_every_malformed_or_foreign_message_raises_signature_error_only(change: dict[str, str]) -> None:
    with pytest.raises(SignatureError):
        verify(headers(**change), BODY, [A, PUBLIC], AT)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_named(name: str) -> None:
    sent = headers()
    del sent[name]
    with pytest.raises(SignatureError, match=name):
        verify(sent, BODY, [A], AT)


@pytest.mark.parametrize("keys", [[], ["whsec_short"], ["whpk_AAAA"], [B]])
def test_unusable_keys_accept_nothing(keys: list[str]) -> None:
    with pytest.raises(SignatureError):
        verify(headers(), BODY, keys, AT)


def test_a_changed_body_is_refused() -> None:
    with pytest.raises(SignatureError):
        verify(headers(), BODY + b" ", [A], AT)


@given(st.text(max_size=40), st.text(max_size=20), st.text(max_size=80), st.binary(max_size=40))
def test_verify_raises_nothing_but_signature_error(
    webhook_id: str, timestamp: str, signature: str, body: bytes
) -> None:
    sent: dict[str, Any] = headers(signature, webhook_id=webhook_id, webhook_timestamp=timestamp)
    with pytest.raises(SignatureError):
        verify(sent, body, [A, PUBLIC], AT)


def test_new_keys_are_of_the_documented_shape_and_sign() -> None:
    secret, private = signing.make_shared_secret(), signing.make_private_key()
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    signature = sign(MSG, AT, BODY, [private, secret])
    for key in (secret, signing.public_key(private)):
        verify(headers(signature), BODY, [key], AT)


def test_the_public_key_is_the_second_half_of_the_private_one() -> None:
    assert signing.public_key(PRIVATE) == PUBLIC
