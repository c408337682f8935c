"""What a gossip run leaves behind, and what it keeps."""

from gradientmail_core.engine.gossip_roster import Listed, listed_gossip
from gradientmail_core.engine.gossip_shares import payload_number
from gradientmail_core.engine.gossip_sweeping import kept_means, outlived, sweep
from gradientmail_core.protocol.gossip import MeanKey, RosterKey, ShareKey
from gradientmail_core.protocol.keys import blob_key
from tests.core.engine.gossip_parts import virtually

SHA = "7" * 64


def rounds(numbers, fragments=(0, 1)):
    keys = [RosterKey(round) for round in numbers]
    keys += [ShareKey(round, "start", p, "a") for round in numbers for p in fragments]
    return [*keys, *(MeanKey(round, p, True) for round in numbers for p in fragments)]


def test_everything_three_rounds_old_goes_and_records_go_first():
    gone = outlived(Listed(tuple(rounds(range(8)))), 8, 2)
    assert {key.round for key in gone} == {0, 1, 2, 3, 4, 5}
    kinds = [isinstance(key, MeanKey) for key in gone]
    assert kinds == sorted(kinds, reverse=True)


def test_the_two_newest_means_stay_however_old():
    listed = Listed((*rounds(range(8), ()), *(MeanKey(round, 0, True) for round in (0, 2, 4)), MeanKey(7, 1, True)))
    assert kept_means(listed, 2) == {MeanKey(2, 0, True), MeanKey(4, 0, True), MeanKey(7, 1, True)}
    assert [key for key in outlived(listed, 8, 2) if isinstance(key, MeanKey)] == [MeanKey(0, 0, True)]


async def filled(place, numbers):
    here = await place.surroundings("a")
    for key in rounds(numbers):
        await place.mailbox.put(key.path, b"x")
        await place.mailbox.put(blob_key(payload_number(key.round, 1, 2), "a", SHA), b"x")
    return here


def blobs_left(place):
    return sorted({int(key.split("/")[1]) // 2 - 1 for key in place.listed("blobs/") if SHA in key})


def test_payloads_go_with_their_rounds_and_the_initial_ones_stay():
    async def main(place):
        here = await filled(place, range(8))
        await place.mailbox.put(blob_key(payload_number(3, 0, 2), "dead", "6" * 64), b"an orphan")
        await sweep(here.host, here.run, await listed_gossip(here.host, here.board), 8)
        return blobs_left(place), place.listed("blobs/"), place.listed("live/gossip/"), here.run.manifest

    rounds_left, blobs, live, manifest = virtually(main)
    assert rounds_left == [6, 7] and not any("dead" in key for key in blobs)
    assert {section.key for section in manifest.theta} <= set(blobs)
    assert {int(key.split("/")[2]) for key in live} == {6, 7}


def test_a_listing_that_hides_means_costs_no_payload_that_is_needed():
    async def main(place):
        here = await filled(place, range(8))
        listed = await listed_gossip(here.host, here.board)
        lagging = Listed(tuple(key for key in listed.keys if key not in (MeanKey(7, 0, True), MeanKey(6, 0, True))))
        await sweep(here.host, here.run, lagging, 12)
        hidden = Listed(tuple(key for key in listed.keys if key.round < 5 or not isinstance(key, MeanKey)))
        await sweep(here.host, here.run, Listed(tuple(k for k in hidden.keys if k != MeanKey(4, 0, True))), 12)
        return blobs_left(place)

    assert {6, 7} <= set(virtually(main))
