-- Whether the mail server has accepted this mail before.
SELECT sent_at
FROM posthouse.mails
WHERE event_id = %(event_id)s
  AND kind = %(kind)s
