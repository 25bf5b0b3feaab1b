-- consumer: groups that are queued, leased and ready
return {'ok', tally('groups', 'queued', ARGV[2]), tally('groups', 'leased', ARGV[2]),
  tally('groups', 'ready', ARGV[2])}
