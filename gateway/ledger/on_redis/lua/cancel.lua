-- reason, ids; answers groups and trajectories
local OPEN = {queued = true, leased = true, ready = true, delivered = true}
local groups, trajectories = 0, 0
for i = 3, #ARGV do
  local r = load(ARGV[i])
  if r and OPEN[r.state] then
    move(r, 'cancel', 'cancelled', ARGV[2], {reason = ARGV[2]})
    drop_payload(r)
    groups, trajectories = groups + 1, trajectories + r.size
  end
end
return finish({'ok', groups, trajectories})
